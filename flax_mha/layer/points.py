"""Points: named tensors of a call, which can be read, and changed by x ← keep·x + add.

Sources: Vig et al., "Causal Mediation Analysis for Interpreting Neural NLP", 2020; Meng et al.,
"Locating and Editing Factual Associations in GPT", 2022 (patching); Turner et al., "Activation
Addition", 2023 (steering).
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.linen.dtypes import promote_dtype

from flax_mha import sharding
from flax_mha.base import shapes
from flax_mha.base.coordinates import At, ScoreArray
from flax_mha.base.shapes import Dims
from flax_mha.kernels import Capture, dot_product_attention, observe
from flax_mha.kernels.softmax import finite
from flax_mha.kernels.stored import dequantize
from flax_mha.layer.linear import Linear
from flax_mha.scores import Bias, ScoreMod

Path: TypeAlias = tuple[str, ...]
COLLECTION = "edits"
_FEATURES = ("batch", "norm_length", None)


class Edit(struct.PyTreeNode):
    """A change of a named tensor: x ← keep·x + add.

    Both numbers or arrays broadcast to x, have gradients, and are used in float32 at least. A
    `keep` of 0 removes x even where it is NaN.

    Attributes:
      keep: the factor (default: 1).
      add: the summand (default: 0).
      heads: for `attention_weights`, the indices of the heads to change (default: all). Only these
        leave the fused kernel. The arrays' axis of heads has only these.
    """

    keep: Any = 1.0
    add: Any = 0.0
    heads: tuple[int, ...] | None = struct.field(pytree_node=False, default=None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return keep·x + add, in the dtype of x."""
        dtype = shapes.wide(x.dtype)
        keep, add = (shapes.lead(jnp.asarray(y, dtype), x.ndim) for y in (self.keep, self.add))
        # A choice by `keep` alone would have no gradient at 0.
        kept = jnp.where((keep == 0) & ~jnp.isfinite(x), 0, x).astype(dtype)
        return (keep * kept + add).astype(x.dtype)


class Visit(NamedTuple):
    """A point that a call came to.

    Attributes:
      tensor: its shape and dtype.
      is_edited: True if the call had an edit of it.
      parameter: the shape of the module's first parameter, which tells if the module is scanned.
    """

    tensor: jax.ShapeDtypeStruct
    is_edited: bool
    parameter: tuple[int, ...] | None


# The points that calls come to, and the paths of nnx modules by `id`; linen modules know theirs.
_Listing: TypeAlias = tuple[dict[Path, Visit], Mapping[int, Path]]
_LISTING: contextvars.ContextVar[_Listing | None] = contextvars.ContextVar("listing", default=None)


@contextlib.contextmanager
def listing(visits: dict[Path, Visit], paths: Mapping[int, Path]) -> Iterator[None]:
    """Collect the points of all calls in this context in `visits`, by module path and name."""
    token = _LISTING.set((visits, paths))
    try:
        yield
    finally:
        _LISTING.reset(token)


def path_of(module: Any) -> Path:
    """Return the path of an nnx module, as far as `listing` knows it."""
    listed = _LISTING.get()
    return () if listed is None else listed[1].get(id(module), ())


@dataclasses.dataclass(eq=False)
class Points:
    """The points of one call of a module: edits them, and keeps those that are read.

    Attributes:
      path: the module's path.
      edits: the edits by name.
      capture: the names to read, without prefix, or None.
      prefix: the prefix of all names.
      parameter: the shape of the module's first parameter, or None.
      captured: the tensors read so far, by name without prefix.
      seen: the names of the points so far.
    """

    path: Path = ()
    edits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    capture: Capture | None = None
    prefix: str = "attention_"
    parameter: tuple[int, ...] | None = None
    captured: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    seen: list[str] = dataclasses.field(default_factory=list)

    def edit(self, name: str, x: jax.Array | jax.ShapeDtypeStruct) -> Edit | None:
        """Return the edit of a point whose tensor is like x, or None.

        Raises:
          ValueError: if the edit does not broadcast to the tensor.
        """
        name = self.prefix + name
        edit: Edit | None = self.edits.get(name)
        self.seen.append(name)
        if (listed := _LISTING.get()) is not None:
            tensor = jax.ShapeDtypeStruct(x.shape, x.dtype)
            listed[0][(*self.path, name)] = Visit(tensor, edit is not None, self.parameter)
        if edit is not None:
            some = edit.heads is not None
            shape = (*x.shape[:-3], len(edit.heads or ()), *x.shape[-2:]) if some else x.shape
            for field in ("keep", "add"):
                shapes.check_broadcasts(
                    f"`{field}` of the edit {'/'.join((*self.path, name))}",
                    np.shape(getattr(edit, field)), shape, "the tensor",
                    "give one number, or an array that broadcasts to it",
                )  # fmt: skip
        return edit

    def __call__(
        self, name: str, x: jax.Array, axes: sharding.LogicalNames = _FEATURES,
        pick: Callable[[jax.Array, Capture], jax.Array] = lambda x, _: x,
    ) -> jax.Array:  # fmt: skip
        """Return x as edited, and keep it if it is to be read.

        Args:
          name: the point's name, without prefix.
          x: the tensor.
          axes: the logical names of its axes.
          pick: a function of x and the capture, to the part of x that is kept.
        """
        edit = self.edit(name, x)
        if edit is not None:
            x = sharding.auto(lambda x, edit: edit(x), axes, x, edit)
        if self.capture is not None and name in self.capture.what:
            self.captured[name] = pick(x, self.capture)
        return x

    def needs(self, name: str) -> bool:
        """Return True if a point that costs something is to be read, edited or listed."""
        is_read = self.capture is not None and name in self.capture.what
        return is_read or self.prefix + name in self.edits or _LISTING.get() is not None

    def finish(self, module: nn.Module | None = None) -> None:
        """Check that the call had a point for each edit, and sow the tensors read in a module.

        Raises:
          ValueError: if an edit had no point.
        """
        if unseen := sorted({*self.edits} - {*self.seen}):
            raise ValueError(
                f"edits must be of points that the call of {'/'.join(self.path) or 'the module'} "
                f"has, {self.seen}, got {unseen}; flax_mha.edits.names lists those of a model"
            )
        if module is not None:
            for name, x in self.captured.items():
                module.sow("intermediates", self.prefix + name, x)


def of_module(module: nn.Module, capture: Capture | None = None, prefix: str = "") -> Points:
    """Return the points of a call of a linen module, with the edits at its path.

    They are in the collection `edits`, or beside the module's parameters under that name, where a
    transformation passes no other collection.
    """
    variables = module.variables
    parameters = {**variables.get("params", {})}
    values = {**variables.get(COLLECTION, {}), **parameters.pop(COLLECTION, {})}
    edits = {name: edit for name, edit in values.items() if isinstance(edit, Edit)}
    leaves = jax.tree.leaves(parameters) if _LISTING.get() is not None else ()
    capture = capture if module.is_mutable_collection("intermediates") else None
    shape = np.shape(leaves[0]) if leaves else None
    return Points(tuple(module.path), edits, capture, prefix, shape)


def pick_tokens(x: jax.Array, capture: Capture) -> jax.Array:
    """Return the captured queries of features [*B, T, D]."""
    return _pick_heads(x[..., None, :], dataclasses.replace(capture, heads=None))[..., 0, :]


def _pick_heads(x: jax.Array, capture: Capture) -> jax.Array:
    """Return the captured queries and heads of x [*B, T, N, H]."""
    heads, queries = capture.chosen(Dims.of(x, x, x))
    return jnp.swapaxes(observe.pick(jnp.swapaxes(x, -3, -2), heads, queries), -3, -2)


def of_heads(points: Points, name: str, x: jax.Array) -> jax.Array:
    """Apply a point of queries or outputs of heads [*B, T, N, H]."""
    return points(name, x, sharding.HEADS, _pick_heads)


def of_keys(points: Points, name: str, x: jax.Array, q: jax.Array) -> jax.Array:
    """Apply a point of keys or values [*B, S, K, H], for queries [*B, T, N, H]."""

    def pick(x: jax.Array, capture: Capture) -> jax.Array:
        heads, _ = capture.chosen(Dims.of(q, q, q))
        return x if heads is None else jnp.take(x, heads // (q.shape[-2] // x.shape[-2]), -2)

    return points(name, x, sharding.KV_HEADS, pick)


def of_results(points: Points, linear: Linear, x: jax.Array, out: jax.Array) -> jax.Array:
    """Apply the point of each head's share of the output, [*B, T, N, D], if it is needed.

    Args:
      points: the points of the call.
      linear: the output projection.
      x: the heads' outputs [*B, T, N, Hv].
      out: the output [*B, T, D].

    Returns:
      out, or the sum of edited shares.
    """
    if linear.kernel is None or not points.needs("result"):
        return out

    def share(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x, kernel = promote_dtype(x, kernel, dtype=linear.dtype)
        return jnp.einsum("...tnv,nvd->...tnd", x, kernel, precision=linear.precision)

    names = ("batch", "length", "heads", None)
    shares = points("result", sharding.auto(share, names, x, linear.kernel), names, _pick_heads)
    if points.prefix + "result" not in points.edits:
        return out

    def add(shares: jax.Array, bias: jax.Array | None) -> jax.Array:
        total = shares.sum(-2, dtype=shapes.wide(shares.dtype))
        if bias is not None:
            total = total + shapes.lead(bias.astype(total.dtype), total.ndim)
        return total.astype(out_dtype)

    out_dtype = out.dtype
    return sharding.auto(add, _FEATURES, shares, linear.bias)


def of_scores(points: Points, arguments: dict[str, Any], q: jax.Array, S: int) -> None:
    """Put edits of scores and weights into the arguments of attention from q to S keys."""
    *B, T, N, _ = q.shape
    scores = jax.ShapeDtypeStruct((*B, N, T, S), shapes.wide(q.dtype))
    edit = points.edit("scores", scores)
    if edit is not None:
        bias = arguments.pop("bias")
        before = () if bias is None else (Bias(bias),)
        arguments["scores"] = (*arguments["scores"], *before, _EditedScores(edit))
    if "attention" not in arguments:
        edit = points.edit("weights", scores.update(dtype=q.dtype))
        if edit is not None:
            arguments["attention"] = functools.partial(_attend_with_weights, edit)


class _EditedScores(ScoreMod):
    """keep·score + add, for arrays that broadcast to the scores [*B, N, T, S]."""

    edit: Edit

    def bind(self, dims: Dims) -> Self:
        def over_scores(x: Any) -> ScoreArray:
            return ScoreArray(shapes.lead(jnp.asarray(x, jnp.float32), len(dims.logits)))

        return self.replace(edit=jax.tree.map(over_scores, self.edit))

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        return Edit(self.edit.keep.array, self.edit.add.array)(score)


def _attend_with_weights(
    edit: Edit, q: jax.Array, k: Any, v: Any, *, capture: Capture | None = None,
    return_weights: bool = False, **call: Any,
) -> Any:  # fmt: skip
    """Compute attention with the weights of some heads edited. The others are the kernel's."""
    if call.get("dropout_rate"):
        raise ValueError(
            f"an edit of attention_weights needs a call without dropout, got dropout_rate="
            f"{call['dropout_rate']}; give deterministic=True"
        )
    dims = shapes.attention_dims(q, k, v)
    names = () if capture is None else tuple(capture.what)
    chosen, _ = Capture((), edit.heads).chosen(dims)
    heads = np.arange(dims.N) if chosen is None else chosen
    kept, queries = (capture or Capture((), edit.heads)).chosen(dims)
    read = np.arange(dims.N) if kept is None else kept
    both = np.union1d(heads, read)
    out, *whole, values = dot_product_attention(
        q, k, v, capture=Capture((*{*names, "weights"},), tuple(both.tolist())),
        return_weights=return_weights, **call,
    )  # fmt: skip

    def change(edit: Edit, v: jax.Array, out: jax.Array, w: jax.Array, *whole: jax.Array) -> Any:
        at = np.searchsorted(both, heads)
        new = edit(w[..., at, :, :])
        v = jnp.take(v, heads // dims.G, -2)
        z = jnp.einsum("...hts,...shd->...thd", new, finite(v), precision=call.get("precision"))
        # A weight of 0 hides a value that is not finite.
        bad = jnp.swapaxes(~jnp.isfinite(v).all(-1), -1, -2)[..., None, :]
        bad = jnp.swapaxes(((new != 0) & bad).any(-1), -1, -2)[..., None]
        out = out.at[..., heads, :].set(jnp.where(bad, jnp.nan, z).astype(out.dtype))
        return [
            out,
            w.at[..., at, :, :].set(new),
            *(x.at[..., heads, :, :].set(new) for x in whole),
        ]

    axes = ("batch", None, "length", None)
    out, values["weights"], *whole = sharding.auto(
        change, [sharding.HEADS, axes, *(axes for _ in whole)],
        edit, dequantize(v), out, values["weights"], *whole,
    )  # fmt: skip
    at = None if read.size == both.size else np.searchsorted(both, read)
    captured = {name: observe.pick(values[name], at, queries) for name in names}
    return (out, *whole, *([captured] if capture else []))
