"""Points: named tensors of a call, which can be read, and changed by x ← keep·x + add.

Sources: Vig et al., "Causal Mediation Analysis for Interpreting Neural NLP", 2020; Meng et al.,
"Locating and Editing Factual Associations in GPT", 2022 (patching); Turner et al., "Activation
Addition", 2023 (steering).
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import sharding
from flax_mha.base import shapes
from flax_mha.kernels import Capture

Path: TypeAlias = tuple[str, ...]
COLLECTION = "edits"
FEATURES = ("batch", "norm_length", None)


class Edit(struct.PyTreeNode):
    """A change of a named tensor: x ← keep·x + add.

    `keep` and `add` are numbers or arrays that broadcast to x. They have gradients, and are used in
    float32 at least. A `keep` of 0 removes x even where it is NaN.

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


# The masks of the pairs whose weights calls read, by name.
_PAIRS: contextvars.ContextVar[Mapping[str, Any] | None]
_PAIRS = contextvars.ContextVar("pairs", default=None)


@contextlib.contextmanager
def reading_pairs(pairs: Mapping[str, Any]) -> Iterator[None]:
    """Let layers called in this context read the mean weights on pairs, as `attention_pairs`."""
    token = _PAIRS.set(pairs)
    try:
        yield
    finally:
        _PAIRS.reset(token)


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
      reads: the names to read, without prefix, or None.
      prefix: the prefix of all names.
      parameter: the shape of the module's first parameter, or None.
      captured: the tensors read so far, by name without prefix.
      seen: the names of the points so far.
    """

    path: Path = ()
    edits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reads: Capture | None = None
    prefix: str = "attention_"
    parameter: tuple[int, ...] | None = None
    captured: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    seen: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_active(self) -> bool:
        """True if there is something to edit, read or list."""
        used = (self.edits, self.reads, self.pairs)
        return any(used) or _LISTING.get() is not None

    @property
    def pairs(self) -> Mapping[str, Any]:
        """The masks of pairs whose mean weights the call reads, by name."""
        return _PAIRS.get() or {}

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
        self, name: str, x: jax.Array, axes: sharding.LogicalNames = FEATURES,
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
        if self.reads is not None and name in self.reads.what:
            self.captured[name] = pick(x, self.reads)
        return x

    def of_softmax(self) -> Capture | None:
        """Return the capture of the values of a softmax alone, or None if there are none."""
        return None if self.reads is None else self.reads.of_softmax()

    def needs(self, name: str) -> bool:
        """Return True if a point that costs something is to be read, edited or listed."""
        is_read = self.reads is not None and name in self.reads.what
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


def of_module(module: nn.Module, reads: Capture | None = None, prefix: str = "") -> Points:
    """Return the points of a call of a linen module, with the edits at its path.

    They are in the collection `edits`, or beside the module's parameters under that name, where a
    transformation passes no other collection.
    """
    variables = module.variables
    parameters = {**variables.get("params", {})}
    values = {**variables.get(COLLECTION, {}), **parameters.pop(COLLECTION, {})}
    edits = {name: edit for name, edit in values.items() if isinstance(edit, Edit)}
    leaves = jax.tree.leaves(parameters) if _LISTING.get() is not None else ()
    reads = reads if module.is_mutable_collection("intermediates") else None
    shape = np.shape(leaves[0]) if leaves else None
    return Points(tuple(module.path), edits, reads, prefix, shape)
