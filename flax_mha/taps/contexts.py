"""Contexts that give layers called in them values to read, and other fields."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax

from flax_mha.kernels import Capture

# A function that is called with each point: the module, the name, the tensor, and True if edited.
visitor = jax.make_user_context(None)


@dataclasses.dataclass(eq=False)
class _Pairs:
    """Masks of pairs by name. It equals itself alone, so that JAX traces anew for other masks."""

    masks: Mapping[str, Any]


reader = jax.make_user_context(None)


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
        with reader(value):
            yield
    finally:
        value.masks = {}  # JAX's caches keep the value, and must keep no arrays.
