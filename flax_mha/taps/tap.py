"""The tap of a call, which edits and captures its named tensors, and the context that it reads."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from flax_mha import sharding
from flax_mha.base import checks
from flax_mha.base.shapes import Shape
from flax_mha.base.tensors import TENSORS
from flax_mha.kernels import Capture
from flax_mha.taps.edit import Edit

COLLECTION = "edits"


class Looking(NamedTuple):
    """The values that modules in a context capture, and functions that they call.

    Attributes:
      capture: the values to capture (default: those in the modules' fields).
      at_tensor: a function of a module, a tensor's name, the tensor, and True if it is edited.
      at_softmax: a function of a tap, queries, their keys and values, and a call's arguments.
    """

    capture: Capture | None = None
    at_tensor: Callable[..., None] | None = None
    at_softmax: Callable[..., None] | None = None


_NOBODY = Looking()
_context = jax.make_user_context(None)  # JAX compares None faster than a `Looking`.


def current() -> Looking:
    """Return the values and functions of this context."""
    return _context.value or _NOBODY


@contextlib.contextmanager
def looking(**fields: Any) -> Iterator[None]:
    """Set fields of `Looking` for all modules that run in this context."""
    with _context(current()._replace(**fields)):
        yield


def capture_of(own: Capture | None) -> Capture | None:
    """Return the capture of a module that has a capture of its own."""
    capture = current().capture or own
    return capture if capture and capture.what else None


@dataclasses.dataclass(eq=False)
class Tap:
    """The named tensors of one call of a module.

    Attributes:
      module: the module that is called, which sows in `collection`.
      edits: edits by name.
      prefix: the prefix of names, which `base.tensors` lists without it.
      reads: the tensors to sow.
      seen: the shapes of tensors so far, by name.
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
        """True if tensors are edited, captured or listed."""
        context = current()
        return bool(self.edits or self.reads or context.at_tensor or context.at_softmax)

    def is_edited(self, name: str) -> bool:
        """Return True if a tensor is edited."""
        return self.prefix + name in self.edits

    def needs(self, name: str) -> bool:
        """Return True if a tensor that the output doesn't need must be computed."""
        is_read = self.reads is not None and name in self.reads.what
        return is_read or self.is_edited(name) or current().at_tensor is not None

    def __call__(self, name: str, x: jax.Array) -> jax.Array:
        """Return a tensor after its edit, named for remat, and sow it if it is captured."""
        axes = TENSORS[name].axes
        if self.is_active:
            if (edit := self.edit(name, x)) is not None:
                x = sharding.auto(lambda x, edit: edit(x), axes, x, edit)
            if self.reads is not None and name in self.reads.what:
                num_heads = self.seen["attention_q"][-2] if "kv_heads" in axes else 0
                self.sow(name, self.reads.pick(x, axes, num_heads))
        return checkpoint_name(x, name) if TENSORS[name].named else x

    def edit(self, name: str, x: jax.Array | jax.ShapeDtypeStruct) -> Edit | None:
        """Return the edit of a tensor like x, or None."""
        name = self.prefix + name
        edit, self.seen[name] = self.edits.get(name), x.shape
        if (visit := current().at_tensor) is not None:
            visit(self.module, name, x, edit is not None)
        if edit is not None:
            edit.check(self.path(name), x)
        return edit

    def last(self, name: str, x: jax.Array) -> jax.Array:
        """Return the last tensor of a call after its edit, and refuse edits that none had."""
        x = self(name, x)
        if unused := sorted({*self.edits} - {*self.seen}):
            raise ValueError(
                f"edits must be of tensors that the call has, {[*self.seen]}, got "
                f"{[*map(self.path, unused)]}; flax_mha.edits.names lists those of a model"
            )
        return x

    def refuse(self, names: str, reason: str) -> None:
        """Refuse edits of tensors, named by one letter each, that a call can't apply."""
        for name in filter(self.is_edited, names):
            path = self.path(self.prefix + name)
            raise ValueError(f"an edit of {path} needs a call without {reason}")

    def sow(self, name: str, x: Any) -> None:
        """Sow a tensor or a tree of them."""
        self.module.sow(self.collection, self.prefix + name, x)

    def path(self, name: str) -> str:
        """Return the path of a name. An nnx module doesn't know its own."""
        return "/".join((*getattr(self.module, "path", ()), name))

    def warn_if_lost(self) -> None:
        """Warn if a transformation around this module drops its intermediates."""
        # Flax has no public way to the modules around a transformation.
        around = getattr(getattr(nn.module, "_context", None), "module_stack", ())
        scopes = [getattr(module, "scope", None) for module in around]
        if any(scope and scope.is_mutable_collection("intermediates") for scope in scopes):
            checks.warn(
                f"the capture of {self.path('')[:-1]} is lost, because a transformation around it "
                f"passes no intermediates; give nn.scan variable_axes={{'intermediates': 0}}, say"
            )


def tap_of(module: nn.Module, reads: Capture | None = None, prefix: str = "") -> Tap:
    """Return the tap of a linen module."""
    values = module.variables.get(COLLECTION, {})
    edits = {name: edit for name, edit in values.items() if isinstance(edit, Edit)}
    reads = capture_of(reads) if module.is_mutable_collection("intermediates") else None
    return Tap(module, edits, prefix, reads=reads)
