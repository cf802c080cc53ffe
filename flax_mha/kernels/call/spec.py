"""One attention call without q, k and v, in the form that all kernels read."""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh

from flax_mha.base import checks
from flax_mha.base.coordinates import Array, At, ScoreArray, is_user_defined, whole
from flax_mha.base.loops import select
from flax_mha.base.shapes import Dims, wide
from flax_mha.base.trees import combine, is_array, partition, tree_nodes
from flax_mha.kernels.call.dropout import WeightDropout
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.stored import dequantize
from flax_mha.masks import Mask
from flax_mha.masks.algebra import TracedNumbers, evaluate
from flax_mha.positions.turn import Turn
from flax_mha.scores import ScoreMod, Vectors, changed
from flax_mha.sharding.devices import Platform

# An array, or the `Stored` keys of a cache, which are never to be rotated.
Keys = TypeVar("Keys", bound=Any)


class Sums(NamedTuple):
    """The maximum and the sum of a softmax, [*B, N, T], by which parts of it are merged.

    An lse in float32 cannot do this: near scores of 1e9 it is a multiple of 64.

    Attributes:
      top: the maximum score.
      total: the sum of exp(score − top), 0 for fully masked queries.
    """

    top: jax.Array
    total: jax.Array

    @classmethod
    def of(cls, lse: jax.Array, given: "Sums | None" = None) -> "Sums":
        """Return the sums of a kernel that has only an lse, or `given` ones with its gradients."""
        top = jnp.where(lse == -jnp.inf, jnp.finfo(lse.dtype).min, jax.lax.stop_gradient(lse))
        total = jnp.exp(lse - top)
        return cls(top, total) if given is None else cls(given.top, given.total * total)

    @property
    def lse(self) -> jax.Array:
        """The log of the sum of exp(score), −∞ for fully masked queries."""
        is_empty = self.total == 0
        lse = self.top + jnp.log(jnp.where(is_empty, 1.0, self.total))
        return jnp.where(is_empty, -jnp.inf, lse)


# An output [*B, T, N, Hv] and its softmax.
Result = tuple[jax.Array, Sums]


def name_result(out: Any, sums: Any) -> tuple[Any, Any]:
    """Return a kernel's output and sums with the names "z" and "lse", for `jax.checkpoint`.

    A custom derivative rule names its residuals. If a policy stores both, the forward kernel does
    not run again.
    """
    return checkpoint_name(out, "z"), checkpoint_name(sums, "lse")


class TileSize(NamedTuple):
    """The queries and keys of a tile that a caller sets; None where the kernel chooses."""

    q: int | None = None
    k: int | None = None


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A call that a kernel can compute.

    Attributes:
      run: the function that computes it.
      takes_result: True if `run` accepts a precomputed result of these and other keys, without
        sinks, and computes only its gradients.
      tile: the queries and keys of a tile, if the kernel has a choice.
      why: the reason for these sizes.
    """

    run: Callable[..., Result]
    takes_result: bool = False
    tile: tuple[int, int] | None = None
    why: str | None = None


class Unsupported(Exception):  # noqa: N818 — it names the reason, and is no error by itself
    """The reason why a kernel can't run a call."""


def load(module: str) -> Any:
    """Import a kernel's module, or refuse if this JAX lacks a private name that the kernel uses."""
    try:
        return importlib.import_module(f"flax_mha.kernels.{module}")
    except ImportError as error:
        raise Unsupported(f"JAX {jax.__version__} lacks what it needs: {error}") from None


class AttentionSpec(struct.PyTreeNode):
    """One attention call without q, k and v. Its arrays have been checked against them.

    Attributes:
      mask: a bound mask, or None to see everything.
      scores: bound score functions, applied in order.
      sinks: [N], an extra score per head that takes weight but has no value; or None.
      dropout: the dropout of the weights, or None.
      q_pos: the queries' positions, int32 [*B|1, 1, T, 1]; None for 0 … T−1.
      k_pos: the keys' positions, int32 [*B|1, 1, 1, S]; None for 0 … S−1.
      scale: the factor of q·kᵀ.
      row_ids: the indices of the batch rows, int32 [*B, 1, 1, 1], on a shard of a call; None for
        all.
      head_ids: the indices of the query heads, int32 [1, N, 1, 1], on a shard; None for all.
      count: the number of keys that `normalizers` count, int [*B|1, 1, 1, 1] (default: S).
      turns: the rotations of queries and of keys that are yet to be applied, or None.
      precision: the precision of matmuls. See `jax.lax.Precision`.
      reads_lse: False if the sums are not read, so that a kernel may return 0.
      exact_lse: True if the caller reads the lse, so that it must be exact.
      normalizer: the function from scores to weights. See `normalizers`.
      piece: the number of tokens in a piece, if pieces are in any order: a larger tile is hardly
        ever empty. None if tokens are contiguous.
      blocks: the sizes of tiles that the caller sets.
      platform: the devices that the call will run on.
    """

    mask: Mask | None
    scores: tuple[ScoreMod, ...]
    sinks: jax.Array | None
    dropout: WeightDropout | None
    q_pos: ScoreArray | None
    k_pos: ScoreArray | None
    scale: float | Array
    row_ids: ScoreArray | None = None
    head_ids: ScoreArray | None = None
    count: ScoreArray | None = None
    turns: tuple[Turn, Turn] | None = None
    precision: jax.lax.PrecisionLike = struct.field(pytree_node=False, default=None)
    reads_lse: bool = struct.field(pytree_node=False, default=True)
    exact_lse: bool = struct.field(pytree_node=False, default=False)
    normalizer: str = struct.field(pytree_node=False, default=SOFTMAX)
    piece: int | None = struct.field(pytree_node=False, default=None)
    blocks: TileSize = struct.field(pytree_node=False, default=TileSize())
    platform: Platform = struct.field(pytree_node=False, default=Platform("cpu"))

    def at(self, dims: Dims) -> At:
        """Return the coordinates of all scores of the call."""
        return self.override(whole(dims))

    def override(self, at: At) -> At:
        """Return coordinates, replaced by those that the spec has."""
        arrays = {"row": self.row_ids, "head": self.head_ids, "q": self.q_pos, "k": self.k_pos}
        return at._replace(**{n: x.array for n, x in arrays.items() if x is not None})

    def plain(
        self, q: jax.Array, k: Any, v: Any
    ) -> "tuple[jax.Array, jax.Array, jax.Array, AttentionSpec]":
        """Return rotated queries and keys, stored keys and values as arrays, and the spec."""
        q, rotated, spec = self.turned(q, dequantize(k))
        return q, rotated, dequantize(v), spec

    def turned(self, q: jax.Array, k: Keys) -> "tuple[jax.Array, Keys, AttentionSpec]":
        """Return queries and keys after their rotation, and the spec without it.

        They have the names that a layer gives to rotated ones, for `jax.checkpoint`.
        """
        if self.turns is None:
            return q, k, self
        of_q, of_k = self.turns
        rotated: Any = checkpoint_name(of_k(k), "k")
        return checkpoint_name(of_q(q), "q"), rotated, self.replace(turns=None)

    @property
    def vectors(self) -> bool:
        """True if a score function reads query and key vectors."""
        return any(mod.vectors for mod in self.scores)

    def user_types(self) -> list[type]:
        """Return the types of masks and scores with user-defined functions."""
        nodes = tree_nodes((self.mask, self.scores))
        return [type(x) for x in nodes if isinstance(x, Mask | ScoreMod) and is_user_defined(x)]

    def check_user_functions(self, dims: Dims, dtype: jnp.dtype) -> None:
        """Trace user-defined masks and scores, to find their errors at any length.

        Raises:
          TypeError: if a function closes over traced arrays, because it would lose their gradients.
        """
        if not (types := self.user_types()):
            return
        arrays, static = partition((self, self.at(dims)), is_array)

        def apply(score: jax.Array, vectors: Vectors, arrays: Any) -> jax.Array:
            spec, at = combine(arrays, static)
            return spec.apply(score, at, vectors=vectors)[0]

        def struct_of(x: jax.Array) -> jax.ShapeDtypeStruct:
            aval = jax.typeof(x)  # Without the mesh.
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

        score, *vectors = (
            jax.ShapeDtypeStruct((*dims.B, dims.N, *sizes), wide(dtype))
            for sizes in ((dims.T, dims.S), (dims.T, dims.H), (dims.S, dims.H))
        )
        # User functions do not see the mesh.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            program = jax.make_jaxpr(apply)(score, tuple(vectors), jax.tree.map(struct_of, arrays))
        traced = [x for x in program.consts if isinstance(x, jax.core.Tracer)]
        if traced:
            names = " or ".join(sorted({cls.__name__ for cls in types}))
            raise TypeError(
                f"a function of {names} must be given traced arrays as its args, got one that "
                f"closes over {checks.describe(traced[0])}; write Score(fn, (x,)) or "
                f"Predicate(fn, (x,))"
            )

    def apply(
        self, score: jax.Array, at: At, forbidden: float = -jnp.inf, vectors: Vectors | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Apply the score functions in order, then the mask, to q·kᵀ·scale at some coordinates.

        Masked scores become `forbidden`. `vectors` are the queries and keys, finite under a mask,
        if a score function reads them. Returns the scores and the mask, None without a mask.
        """
        allowed = None if self.mask is None else jnp.asarray(evaluate(self.mask, at))
        if allowed is not None and self.scores:
            # Replace masked scores by 0 before the score functions run: their derivative at a NaN
            # is NaN even if the cotangent is 0.
            score = jnp.where(allowed, score, 0.0)
        with _matmul_precision(self.precision if vectors else None):
            for mod in self.scores:
                score = changed(mod, score, at, vectors)
        if isinstance(self.mask, TracedNumbers) and allowed is not None:
            # In one selection: with a sum after it, XLA:CPU takes half again as long.
            others = self.mask.others()
            hidden = jnp.where(others, jnp.nan, forbidden).astype(score.dtype)
            score = jnp.where(allowed & ~others, score, hidden)
        elif allowed is not None:
            score = select(allowed, score, forbidden)
        return score, allowed

    def apply_dropout(self, weights: jax.Array, at: At) -> jax.Array:
        """Set dropped weights at these coordinates to 0. `scale_kept` scales the outputs.

        Scaling the weights would round them once more in half precision. Their gradients, which
        lack this rounding, would not cancel with the gradient of the sum.
        """
        if self.dropout is None:
            return weights
        return jnp.where(self.dropout.keep(*at), weights, jnp.zeros_like(weights))

    def scale_kept(self, x: jax.Array) -> jax.Array:
        """Scale the product of kept weights and values, to preserve its expectation."""
        if self.dropout is None:
            return x
        return (x.astype(wide(x.dtype)) * self.dropout.scale).astype(x.dtype)


def _matmul_precision(precision: Any) -> contextlib.AbstractContextManager:
    """Return a context that sets the default precision of matmuls."""
    precision = precision[0] if isinstance(precision, tuple) else precision
    if precision is None:
        return contextlib.nullcontext()
    name: Any = getattr(precision, "name", precision)
    # JAX expects the names of `Precision` in lower case here.
    is_member = name in jax.lax.Precision.__members__
    return jax.default_matmul_precision(name.lower() if is_member else name)
