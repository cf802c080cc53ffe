"""What one attention call computes, in one value that every kernel reads."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.linen.dtypes import promote_dtype
from jax.sharding import AbstractMesh

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array, At, ScoreArray, whole
from flax_mha.base.shapes import Dims
from flax_mha.base.trees import combine, is_array, partition, tree_nodes
from flax_mha.kernels.dropout import WeightDropout
from flax_mha.kernels.normalizers import OTHERS, SOFTMAX
from flax_mha.kernels.stored import Stored
from flax_mha.masks import Mask, Predicate
from flax_mha.masks.base import placed, seen, validated
from flax_mha.scores import Bias, Score, ScoreMod, Vectors, as_scores, changed

# An output [*B, T, N, Hv] and its lse [*B, N, T].
Result = tuple[jax.Array, jax.Array]
# A call made ready by a kernel: computes its result. Some kernels take a result that is known, and
# compute only its gradients.
Lowered = Callable[..., Result]


class Refusal(NamedTuple):
    """Why a kernel can't run a call."""

    reason: str


class AttentionSpec(struct.PyTreeNode):
    """Everything about a call but q, k and v. Its arrays have been checked against them.

    Attributes:
      mask: a bound mask, or None to see everything.
      scores: bound, applied in order.
      sinks: [N], one more score a head, that takes weight and gives nothing; or None.
      dropout: of the weights.
      q_pos: positions of the queries, int32 [*B|1, 1, T, 1]; None for 0 … T−1.
      k_pos: positions of the keys, int32 [*B|1, 1, 1, S]; None for 0 … S−1.
      rows: indices of the batch rows, int32 [*B, 1, 1, 1]; None for 0, 1, … Given on a shard of a
        call, whose rows and heads are some of many.
      heads: indices of the query heads, int32 [1, N, 1, 1], likewise.
      scale: of q·kᵀ.
      invalid: queries whose mask has other numbers than 1 and 0, bool [*B|1, N|1, T|1, 1]; or
        None. Their q is NaN; no kernel reads this, see `spoil`.
      precision: of the matrix products, see `jax.lax.Precision`.
      reads_lse: whether anyone reads the lse; if not, a kernel may give 0 in its place.
      exact_lse: whether it is the caller who reads it, and wants it exact.
      normalizer: how scores become weights, see `normalizers`.
    """

    mask: Mask | None
    scores: tuple[ScoreMod, ...]
    sinks: jax.Array | None
    dropout: WeightDropout | None
    q_pos: ScoreArray | None
    k_pos: ScoreArray | None
    scale: float | Array
    rows: ScoreArray | None = None
    heads: ScoreArray | None = None
    invalid: Array | None = None
    precision: jax.lax.PrecisionLike = struct.field(pytree_node=False, default=None)
    reads_lse: bool = struct.field(pytree_node=False, default=True)
    exact_lse: bool = struct.field(pytree_node=False, default=False)
    normalizer: str = struct.field(pytree_node=False, default=SOFTMAX)

    def at(self, dims: Dims) -> At:
        """Where all scores of the call stand."""
        given = {"row": self.rows, "head": self.heads, "q": self.q_pos, "k": self.k_pos}
        arrays = {name: grid.array for name, grid in given.items() if grid is not None}
        return whole(dims)._replace(**arrays)

    @property
    def vectors(self) -> bool:
        """Whether any of the scores sees the vectors of queries and keys."""
        return any(mod.vectors for mod in self.scores)

    def own(self) -> list[type]:
        """The kinds of masks and scores that compute what a user wrote."""
        parts = (x for x in tree_nodes((self.mask, self.scores)) if isinstance(x, Mask | ScoreMod))
        return [type(x) for x in parts if _is_own(type(x))]

    def apply(
        self, score: jax.Array, at: At, forbidden: float = -jnp.inf, vectors: Vectors | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Applies the scores in order, then the mask, with that number where it forbids.

        Args:
          score: from q·kᵀ·scale.
          at: where it stands.
          forbidden: see above.
          vectors: those it is of, if any of the scores sees them; finite where there is a mask.

        Returns:
          The scores, and where the mask allows; None for everywhere.
        """
        allowed = None if self.mask is None else jnp.asarray(seen(self.mask, at))
        if allowed is not None and self.scores:
            # A derivative of NaN times 0 is NaN: what is masked must not enter the functions.
            score = jnp.where(allowed, score, 0.0)
        with _precise(self.precision if vectors else None):
            for mod in self.scores:
                score = changed(mod, score, at, vectors)
        return score if allowed is None else jnp.where(allowed, score, forbidden), allowed

    def spoil(self, out: jax.Array) -> jax.Array:
        """Makes outputs [*B, T, N, ·] of invalid queries NaN: an empty row would hide it."""
        if self.invalid is None:
            return out
        return _spoiled(out, jnp.swapaxes(jnp.asarray(self.invalid), -3, -2))

    def spoil_lse(self, lse: jax.Array) -> jax.Array:
        """Likewise lse [*B, N, T]."""
        return lse if self.invalid is None else _spoiled(lse, jnp.asarray(self.invalid)[..., 0])

    def drop(self, weights: jax.Array, at: At) -> jax.Array:
        """Zeroes dropped weights at those places; `gain` is for what comes of the others.

        Multiplied by it themselves they would be rounded once more in half precision, and their
        gradients, which have no such rounding, would not cancel against those of their sum.
        """
        if self.dropout is None:
            return weights
        return jnp.where(self.dropout.keep(*at), weights, jnp.zeros_like(weights))

    def gain(self, x: jax.Array) -> jax.Array:
        """A product with weights that dropout has kept, times their gain."""
        return x if self.dropout is None else x * self.dropout.gain


def _precise(precision: Any) -> contextlib.AbstractContextManager:
    """In which products are of that precision, if they don't say otherwise."""
    one = precision[0] if isinstance(precision, tuple) else precision
    if one is None:
        return contextlib.nullcontext()
    name: Any = getattr(one, "name", one)
    # JAX knows these in small letters here.
    small = name in jax.lax.Precision.__members__
    return jax.default_matmul_precision(name.lower() if small else name)


def _spoiled(x: jax.Array, invalid: jax.Array) -> jax.Array:
    """Makes x NaN there, and gradients through it."""
    factor = jnp.where(invalid, jnp.nan, 1.0).astype(x.dtype)
    return x * sharding.like(jnp.broadcast_to(factor, x.shape), x)


def prepare(
    q: Array,
    k: Array | Stored,
    v: Array | Stored,
    *,
    mask: masks.MaskLike | None = None,
    bias: Array | None = None,
    scores: Sequence[ScoreMod] = (),
    sinks: Array | None = None,
    scale: float | Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = False,
    q_positions: Array | int | None = None,
    kv_positions: Array | int | None = None,
    precision: jax.lax.PrecisionLike = None,
    normalizer: str = SOFTMAX,
) -> tuple[jax.Array, jax.Array | Stored, jax.Array | Stored, AttentionSpec]:
    """Checks a call, and brings it into the one form that kernels read."""
    q = jnp.asarray(checks.floating("q", q))
    if isinstance(k, Stored) and isinstance(v, Stored):
        k, v = k.replace(dtype=q.dtype), v.replace(dtype=q.dtype)
        dims = shapes.attention_dims(q, k, v)
    else:
        k, v = (jnp.asarray(checks.floating(name, x)) for name, x in (("k", k), ("v", v)))
        dims = shapes.attention_dims(q, k, v)
        promoted: list[jax.Array] = promote_dtype(q, k, v, dtype=None)
        q, k, v = promoted
    scores = as_scores(scores)
    if bias is not None:
        scores = (*scores, Bias(bias))
    if sinks is not None:
        checks.floating("sinks", sinks)
        if sinks.shape != (dims.N,):
            raise ValueError(f"sinks must have shape [N] = {(dims.N,)}, got {sinks.shape}")
        sinks = jnp.asarray(sinks)
    if precision is not None:
        checks.precision("precision", precision)
    checks.choice("normalizer", normalizer, {SOFTMAX: None, **OTHERS})
    if sinks is not None and normalizer != SOFTMAX:
        raise ValueError(f"sinks take weight in a softmax, got normalizer={normalizer!r}; drop one")
    bound, invalid = (None, None) if mask is None else validated(masks.as_mask(mask).bind(dims))
    if invalid is not None:
        q = _spoiled(q, jnp.swapaxes(jnp.asarray(invalid), -3, -2))
    spec = AttentionSpec(
        mask=bound,
        scores=tuple(mod.bind(dims) for mod in scores),
        sinks=sinks,
        dropout=_dropout(dropout_rate, dropout_rng, broadcast_dropout),
        q_pos=_positions("q_positions", q_positions, (*dims.B, dims.T), "T", (-3, -1)),
        k_pos=_positions("kv_positions", kv_positions, (*dims.B, dims.S), "S", (-3, -2)),
        scale=dims.H**-0.5 if scale is None else _scale(scale),
        precision=precision,
        normalizer=normalizer,
        invalid=invalid,
    )
    if bound is not None:
        spec = spec.replace(mask=placed(bound, spec.at(dims)))
    _rehearse(spec, dims, q.dtype)
    return q, k, v, spec


def _dropout(rate: float, rng: jax.Array | None, broadcast: bool) -> WeightDropout | None:
    """The dropout of a call, None if there is none."""
    checks.rate("dropout_rate", rate)
    checks.flag("broadcast_dropout", broadcast)
    if not rate:
        return None
    if rng is None:
        raise ValueError(
            f"dropout_rate={rate} needs a dropout_rng, got None; "
            f"give a jax.random.key, or dropout_rate=0"
        )
    return WeightDropout.from_key(checks.key("dropout_rng", rng), rate, broadcast)


def _rehearse(spec: AttentionSpec, dims: Dims, dtype: jnp.dtype) -> None:
    """Traces masks and scores of a user's own, so that their mistakes are known at any length.

    Raises:
      TypeError: if one of them closes over traced arrays, whose gradients would be lost.
    """
    if not (own := spec.own()):
        return
    arrays, static = partition((spec, spec.at(dims)), is_array)

    def apply(score: jax.Array, vectors: Vectors, arrays: Any) -> jax.Array:
        spec, at = combine(arrays, static)
        return spec.apply(score, at, vectors=vectors)[0]

    def struct_of(x: jax.Array) -> jax.ShapeDtypeStruct:
        # The type of x without its mesh.
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    score, *vectors = (
        jax.ShapeDtypeStruct((*dims.B, dims.N, *sizes), shapes.wide(dtype))
        for sizes in ((dims.T, dims.S), (dims.T, dims.H), (dims.S, dims.H))
    )
    # No mesh: a function knows nothing of one.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        program = jax.make_jaxpr(apply)(score, tuple(vectors), jax.tree.map(struct_of, arrays))
    traced = [x for x in program.consts if isinstance(x, jax.core.Tracer)]
    if traced:
        names = " or ".join(sorted({kind.__name__ for kind in own}))
        raise TypeError(
            f"a function of {names} must be given traced arrays as its args, got one that closes "
            f"over {checks.describe(traced[0])}; write Score(fn, (x,)) or Predicate(fn, (x,))"
        )


def _is_own(kind: type) -> bool:
    """Whether a mask or score computes what a user wrote."""
    return kind in (Predicate, Score) or kind.__module__.partition(".")[0] != "flax_mha"


def _scale(scale: Any) -> float | jax.Array:
    """What scores are multiplied by: a number, or an array of one, which may be traced."""
    if not (hasattr(scale, "dtype") and hasattr(scale, "shape")):
        return checks.number("scale", scale)
    checks.floating("scale", scale)
    if scale.shape:
        raise ValueError(
            f"scale must be one number, got an array of shape {scale.shape}; scale the queries of "
            f"each head themselves"
        )
    return scale


def _positions(
    name: str, positions: Array | int | None, tokens: shapes.Shape, letter: str,
    axes: tuple[int, int],
) -> ScoreArray | None:  # fmt: skip
    """Positions [length] or [*B, length], or the first of them, over the scores."""
    positions = shapes.positions(name, positions, tokens, letter)
    if positions is None:
        return None
    xp = np if isinstance(positions, np.ndarray) else jnp
    return ScoreArray(xp.expand_dims(shapes.lead(positions, len(tokens)), axes))
