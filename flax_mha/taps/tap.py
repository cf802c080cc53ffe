"""The tap of a call: its tensors by name, each of which can be read and changed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from flax_mha import sharding
from flax_mha.base import checks
from flax_mha.base.tensors import STORED
from flax_mha.kernels import Capture
from flax_mha.taps import contexts
from flax_mha.taps.edit import Edit

COLLECTION = "edits"
FEATURES = ("batch", "norm_length", None)


@dataclasses.dataclass(eq=False)
class Tap:
    """The points of one call of a module: names, edits and sows their tensors.

    It gives names to those that rematerialization may keep, and does nothing else unless asked. All
    names have the prefix, but those in `reads`. The collection is the first argument of the
    module's `sow`. `seen` are the names of the points so far, and `sower` is the module that an
    `attention_fn` sows weights into.
    """

    module: Any = None
    edits: Mapping[str, Edit] = dataclasses.field(default_factory=dict)
    prefix: str = "attention_"
    collection: Any = "intermediates"
    reads: Capture | None = None
    seen: list[str] = dataclasses.field(default_factory=list)
    sower: Any = None

    @property
    def pairs(self) -> Mapping[str, Any]:
        """The masks of pairs whose mean weights the call reads, by name."""
        return {} if contexts.reader.value is None else contexts.reader.value.masks

    @property
    def is_active(self) -> bool:
        """True if there is something to edit, read or visit."""
        return any((self.edits, self.reads, self.pairs, contexts.visitor.value))

    def needs(self, name: str) -> bool:
        """Return True if a point that costs something is to be edited, read or visited."""
        is_read = self.reads is not None and name in self.reads.what
        return is_read or self.prefix + name in self.edits or contexts.visitor.value is not None

    def edit(self, name: str, x: jax.Array | jax.ShapeDtypeStruct) -> Edit | None:
        """Return the edit of a point whose tensor is like x, or None."""
        name = self.prefix + name
        edit = self.edits.get(name)
        self.seen.append(name)
        if contexts.visitor.value is not None:
            contexts.visitor.value(self.module, name, x, edit is not None)
        if edit is not None:
            edit.check(self.path(name), x)
        return edit

    def __call__(
        self, name: str, x: jax.Array, axes: sharding.LogicalNames = FEATURES, num_heads: int = 0
    ) -> jax.Array:
        """Return x as edited, under its name for `Block.remat`, and sow it if it is to be read.

        `axes` are the logical names of its axes. Keys and values need the number of query heads.
        """
        x = self.change(name, x, axes, num_heads)
        return checkpoint_name(x, name) if name in STORED else x

    def change(
        self, name: str, x: jax.Array, axes: sharding.LogicalNames = FEATURES, num_heads: int = 0
    ) -> jax.Array:
        """Return x as edited, and sow it if it is to be read, where others give x its name."""
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


def tap_of(module: nn.Module, reads: Capture | None = None, prefix: str = "") -> Tap:
    """Return the points of a call of a linen module, with the edits at its path.

    They are in the collection `edits`, or beside the module's parameters under that name, where a
    transformation passes no other collection.
    """
    places = (module.variables, module.variables.get("params", {}))
    values = [pair for place in places for pair in place.get(COLLECTION, {}).items()]
    edits = {name: edit for name, edit in values if isinstance(edit, Edit)}
    reads = contexts.asked(module, reads) if module.is_mutable_collection("intermediates") else None
    return Tap(module, edits, prefix, reads=reads)
