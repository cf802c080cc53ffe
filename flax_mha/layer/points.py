"""Points: named tensors of a call, which can be read, and changed by x ← fn(keep·x + add).

Sources: Vig et al., "Causal Mediation Analysis for Interpreting Neural NLP", 2020; Meng et al.,
"Locating and Editing Factual Associations in GPT", 2022 (patching); Turner et al., "Activation
Addition", 2023 (steering).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import At, ScoreArray
from flax_mha.kernels import Capture
from flax_mha.scores import ScoreMod

COLLECTION = "edits"
FEATURES = ("batch", "norm_length", None)
# A function that is called with each point: the module, the name, the tensor, and True if edited.
visitor = jax.make_user_context(None)


@dataclasses.dataclass(eq=False)
class _Pairs:
    """Masks of pairs by name. It equals itself alone, so that JAX traces anew for other masks."""

    masks: Mapping[str, Any]


_reader = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The capture of all modules in a context, None for none, and who has asked for it."""

    capture: Capture | None
    modules: list[str] = dataclasses.field(default_factory=list, compare=False)


_asked = jax.make_user_context(None)


@dataclasses.dataclass(eq=False)
class Fields:
    """Fields of linen layers by their path, in place of their own. It equals itself alone."""

    by_path: Mapping[tuple[str, ...], Mapping[str, Any]]

    def give(self, layer: nn.Module) -> None:
        """Set the fields of a layer that is called."""
        for name, value in self.by_path.get(layer.path, {}).items():
            object.__setattr__(layer, name, value)


replaced = jax.make_user_context(None)


@contextlib.contextmanager
def capturing(capture: Capture | None) -> Iterator[list[str] | None]:
    """Let modules called in this context capture these values, in place of those of their own.

    Yields the names of the classes of the modules so far, or None inside of an equal context.
    """
    value = _Asked(capture)
    if _asked.value == value:
        yield None
        return
    with _asked(value):
        yield value.modules


def asked(module: Any, own: Capture | None) -> Capture | None:
    """Return the capture of a module's call, given that of its fields."""
    if _asked.value is None:
        return own
    _asked.value.modules.append(type(module).__name__)
    capture: Capture | None = _asked.value.capture
    return capture


@contextlib.contextmanager
def reading_pairs(pairs: Mapping[str, Any]) -> Iterator[None]:
    """Let layers called in this context read the mean weights on pairs, as `attention_pairs`."""
    value = _Pairs(pairs)
    try:
        with _reader(value):
            yield
    finally:
        value.masks = {}  # JAX's caches keep the value, and must keep no arrays.


class Edit(ScoreMod):
    """A change of a named tensor: x ← fn(keep·x + add).

    `keep` and `add` are numbers or arrays that broadcast to x. They have gradients, and are used in
    float32 at least. A `keep` of 0 removes x even where it is NaN.

    >>> Edit(keep=0)  # removes a tensor
    >>> Edit(fn=lambda x: jnp.clip(x, -1, 1))
    >>> Edit(fn=splice, args=(encoder, decoder))  # a sparse autoencoder

    Attributes:
      keep: the factor (default: 1).
      add: the summand (default: 0).
      heads: for `attention_weights`, the indices of the heads to change (default: all). Only these
        leave the fused kernel. The arrays' axis of heads has only these.
      fn: a function fn(x, *args) to a tensor of x's shape, for any point but `attention_scores`
        (default: x itself). Reuse the same function, or each edit compiles a new program.
      args: the function's arrays, which have gradients.
    """

    keep: Any = 1.0
    add: Any = 0.0
    heads: tuple[int, ...] | None = struct.field(pytree_node=False, default=None)
    fn: Callable[..., Any] | None = struct.field(pytree_node=False, default=None)
    args: Any = ()

    def check(self, path: str, x: Any) -> None:
        """Check that the edit fits the tensor of the point at a path, or one like it."""
        shape = x.shape
        if self.heads is not None:
            if not path.endswith("attention_weights"):
                raise ValueError(
                    f"heads of an edit must be None but for attention_weights, got {self.heads} "
                    f"for {path}; give a `keep` of 1 for the other heads"
                )
            shape = (*shape[:-3], len(self.heads), *shape[-2:])
        for name, given in (("keep", self.keep), ("add", self.add)):
            shapes.check_broadcasts(
                f"`{name}` of the edit {path}", np.shape(given), shape, "the tensor",
                "give one number, or an array that broadcasts to it",
            )  # fmt: skip
        if self.fn is None:
            return
        if path.endswith("attention_scores"):
            raise ValueError(
                f"fn of an edit must be None for {path}, because kernels compute scores piece by "
                f"piece, got {self.fn!r}; give the layer scores=(scores.Score(fn),)"
            )
        checks.function("fn", self.fn, "(x, *args) -> x", "give one, or None")
        args = checks.arguments("args", self.args)
        y = jax.eval_shape(self.fn, jax.ShapeDtypeStruct(shape, x.dtype), *args)
        if not jnp.issubdtype(getattr(y, "dtype", bool), jnp.floating) or y.shape != shape:
            raise ValueError(
                f"`fn` of the edit {path} must return real numbers {shape}, got "
                f"{checks.describe(y)}; return the whole tensor"
            )

    def bind(self, dims: shapes.Dims) -> Self:
        """Return the edit for scores of these sizes."""

        def over_scores(x: Any) -> ScoreArray:
            return ScoreArray(shapes.lead(jnp.asarray(x, jnp.float32), len(dims.logits)))

        edit: Self = jax.tree.map(over_scores, self)
        return edit

    def __call__(self, x: jax.Array, at: At | None = None) -> jax.Array:
        """Return fn(keep·x + add), in the dtype of x."""
        dtype = shapes.wide(x.dtype)
        # Of scores, both are in a `ScoreArray`.
        arrays = (jnp.asarray(y, dtype) for y in jax.tree.leaves((self.keep, self.add)))
        keep, add = (shapes.lead(y, x.ndim) for y in arrays)
        # A choice by `keep` alone would have no gradient at 0.
        kept = jnp.where((keep == 0) & ~jnp.isfinite(x), 0, x).astype(dtype)
        y = (keep * kept + add).astype(x.dtype)
        return y if self.fn is None else self.fn(y, *self.args).astype(x.dtype)


@dataclasses.dataclass(eq=False)
class Points:
    """The points of one call of a module: edits them, and sows those that are read.

    All names have the prefix, but those in `reads`. The collection is the first argument of the
    module's `sow`. `seen` are the names of the points so far.
    """

    module: Any = None
    edits: Mapping[str, Edit] = dataclasses.field(default_factory=dict)
    prefix: str = "attention_"
    collection: Any = "intermediates"
    reads: Capture | None = None
    seen: list[str] = dataclasses.field(default_factory=list)

    @property
    def pairs(self) -> Mapping[str, Any]:
        """The masks of pairs whose mean weights the call reads, by name."""
        return {} if _reader.value is None else _reader.value.masks

    @property
    def is_active(self) -> bool:
        """True if there is something to edit, read or visit."""
        return any((self.edits, self.reads, self.pairs, visitor.value))

    def needs(self, name: str) -> bool:
        """Return True if a point that costs something is to be edited, read or visited."""
        is_read = self.reads is not None and name in self.reads.what
        return is_read or self.prefix + name in self.edits or visitor.value is not None

    def edit(self, name: str, x: jax.Array | jax.ShapeDtypeStruct) -> Edit | None:
        """Return the edit of a point whose tensor is like x, or None."""
        name = self.prefix + name
        edit = self.edits.get(name)
        self.seen.append(name)
        if visitor.value is not None:
            visitor.value(self.module, name, x, edit is not None)
        if edit is not None:
            edit.check(self.path(name), x)
        return edit

    def __call__(
        self, name: str, x: jax.Array, axes: sharding.LogicalNames = FEATURES, num_heads: int = 0
    ) -> jax.Array:
        """Return x as edited, and sow it if it is to be read.

        `axes` are the logical names of its axes. Keys and values need the number of query heads.
        """
        edit = self.edit(name, x)
        if edit is not None:
            x = sharding.auto(lambda x, edit: edit(x), axes, x, edit)
        if self.reads is not None and name in self.reads.what:
            self.sow(name, self.reads.pick(x, axes, num_heads))
        return x

    def refuse(self, names: str, reason: str) -> None:
        """Refuse edits of points with names of one letter in a call that cannot apply them."""
        if found := [x for x in names if self.prefix + x in self.edits]:
            path = self.path(self.prefix + found[0])
            raise ValueError(f"an edit of {path} needs a call without {reason}")

    def sow(self, name: str, x: Any) -> None:
        """Sow a tensor, or a tree of them, in the module."""
        self.module.sow(self.collection, self.prefix + name, x)

    def last(self, name: str, x: jax.Array, axes: sharding.LogicalNames = FEATURES) -> jax.Array:
        """Return the last tensor of a call as edited, and check that no edit is left."""
        x = self(name, x, axes)
        if unseen := sorted({*self.edits} - {*self.seen}):
            raise ValueError(
                f"edits must be of points that the call has, {self.seen}, got "
                f"{[*map(self.path, unseen)]}; flax_mha.edits.names lists those of a model"
            )
        return x

    def warn_if_lost(self) -> None:
        """Warn if a transformation around this module alone drops its intermediates."""
        # Flax has no public way to the modules around a transformation.
        around = getattr(getattr(nn.module, "_context", None), "module_stack", ())
        scopes = [getattr(module, "scope", None) for module in around]
        if any(scope and scope.is_mutable_collection("intermediates") for scope in scopes):
            checks.warn(
                f"the capture of {self.path('')[:-1]} is lost, because a transformation around it "
                f"passes no intermediates; give nn.scan variable_axes={{'intermediates': 0}}, say"
            )

    def path(self, name: str) -> str:
        """Return the path of a name, without that of an nnx module, which does not know it."""
        return "/".join((*getattr(self.module, "path", ()), name))


def of_module(module: nn.Module, reads: Capture | None = None, prefix: str = "") -> Points:
    """Return the points of a call of a linen module, with the edits at its path.

    They are in the collection `edits`, or beside the module's parameters under that name, where a
    transformation passes no other collection.
    """
    places = (module.variables, module.variables.get("params", {}))
    values = [pair for place in places for pair in place.get(COLLECTION, {}).items()]
    edits = {name: edit for name, edit in values if isinstance(edit, Edit)}
    reads = asked(module, reads) if module.is_mutable_collection("intermediates") else None
    return Points(module, edits, prefix, reads=reads)
