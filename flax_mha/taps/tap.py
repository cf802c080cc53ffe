"""The tap of a call, which edits and captures its named tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from flax_mha import sharding
from flax_mha.base import checks
from flax_mha.base.shapes import Shape
from flax_mha.base.tensors import TENSORS
from flax_mha.kernels import Capture
from flax_mha.taps.contexts import capture_of, current
from flax_mha.taps.edit import Edit

COLLECTION = "edits"


@dataclasses.dataclass(eq=False)
class Tap:
    """The named tensors of one call of a module.

    Attributes:
      module: the module that is called.
      edits: edits by name, with the prefix.
      prefix: the prefix of the names of tensors in `base.tensors`.
      collection: the first argument of the module's `sow`.
      reads: the tensors to sow.
      seen: the shapes of the tensors so far, by name.
      sower: the module into which an `attention_fn` sows its weights.
    """

    module: Any = None
    edits: Mapping[str, Edit] = dataclasses.field(default_factory=dict)
    prefix: str = "attention_"
    collection: Any = "intermediates"
    reads: Capture | None = None
    seen: dict[str, Shape] = dataclasses.field(default_factory=dict)
    sower: Any = None

    @property
    def is_active(self) -> bool:
        """True if somebody edits, captures or lists tensors of this call."""
        looking = current.value
        return any((self.edits, self.reads, looking.at_tensor, looking.at_softmax))

    def is_edited(self, name: str) -> bool:
        """Return True if a tensor has an edit."""
        return self.prefix + name in self.edits

    def needs(self, name: str) -> bool:
        """Return True if a tensor must be computed although the output does not need it."""
        is_read = self.reads is not None and name in self.reads.what
        return is_read or self.is_edited(name) or current.value.at_tensor is not None

    def __call__(self, name: str, x: jax.Array) -> jax.Array:
        """Return a tensor after its edit, named for `Block.remat`, and sow it if it is captured."""
        x = self.look(name, x) if self.is_active else x
        return checkpoint_name(x, name) if TENSORS[name].named else x

    def look(self, name: str, x: jax.Array) -> jax.Array:
        """Return a tensor after its edit, and sow it if it is captured."""
        axes, edit = TENSORS[name].axes, self.edit(name, x)
        if edit is not None:
            x = sharding.auto(lambda x, edit: edit(x), axes, x, edit)
        if self.reads is not None and name in self.reads.what:
            num_heads = self.seen["attention_q"][-2] if "kv_heads" in axes else 0
            self.sow(name, self.reads.pick(x, axes, num_heads))
        return x

    def edit(self, name: str, x: jax.Array | jax.ShapeDtypeStruct) -> Edit | None:
        """Return the edit of a tensor with the shape and dtype of x, or None."""
        name = self.prefix + name
        edit, self.seen[name] = self.edits.get(name), x.shape
        if current.value.at_tensor is not None:
            current.value.at_tensor(self.module, name, x, edit is not None)
        if edit is not None:
            edit.check(self.path(name), x)
        return edit

    def last(self, name: str, x: jax.Array) -> jax.Array:
        """Return the last tensor of a call after its edit, and check that no edit is left."""
        x = self(name, x)
        if unused := sorted({*self.edits} - {*self.seen}):
            raise ValueError(
                f"edits must be of tensors that the call has, {[*self.seen]}, got "
                f"{[*map(self.path, unused)]}; flax_mha.edits.names lists those of a model"
            )
        return x

    def refuse(self, names: str, reason: str) -> None:
        """Refuse edits of tensors with names of one letter in a call that can't apply them."""
        for name in filter(self.is_edited, names):
            path = self.path(self.prefix + name)
            raise ValueError(f"an edit of {path} needs a call without {reason}")

    def sow(self, name: str, x: Any) -> None:
        """Sow a tensor, or a tree of them, in the module."""
        self.module.sow(self.collection, self.prefix + name, x)

    def path(self, name: str) -> str:
        """Return the path of a name. A module of nnx doesn't know its own."""
        return "/".join((*getattr(self.module, "path", ()), name))

    def warn_if_lost(self) -> None:
        """Warn if a transformation around only this module drops its intermediates."""
        # Flax has no public way to the modules around a transformation.
        around = getattr(getattr(nn.module, "_context", None), "module_stack", ())
        scopes = [getattr(module, "scope", None) for module in around]
        if any(scope and scope.is_mutable_collection("intermediates") for scope in scopes):
            checks.warn(
                f"the capture of {self.path('')[:-1]} is lost, because a transformation around it "
                f"passes no intermediates; give nn.scan variable_axes={{'intermediates': 0}}, say"
            )


def tap_of(module: nn.Module, reads: Capture | None = None, prefix: str = "") -> Tap:
    """Return the tap of a call of a linen module, with the edits at its path.

    They are in the collection `edits`, or next to the module's parameters under that name if a
    transformation passes no other collection.
    """
    places = (module.variables, module.variables.get("params", {}))
    values = [pair for place in places for pair in place.get(COLLECTION, {}).items()]
    edits = {name: edit for name, edit in values if isinstance(edit, Edit)}
    reads = capture_of(reads) if module.is_mutable_collection("intermediates") else None
    return Tap(module, edits, prefix, reads=reads)
