"""The context in which modules show their named tensors to somebody who looks."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from flax_mha.kernels import Capture

# The classes of watched models that have called a module with a capture.
WATCHED: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Looking:
    """The values that modules in a context capture, and functions that they call.

    JAX traces a function once for equal values. Functions are equal only to themselves.

    Attributes:
      capture: the values to capture, in place of those in the modules' fields (default: those).
      watched: the class of the watched model (default: no model).
      at_layer: a function of a linen attention layer that returns the layer to run in its place.
      at_tensor: a function of a module, a tensor's name, the tensor, and True if it is edited.
      at_softmax: a function of a tap, queries, their keys and values, and the arguments of a call.
    """

    capture: Capture | None = None
    watched: type = object
    at_layer: Callable[[Any], Any] | None = None
    at_tensor: Callable[..., None] | None = None
    at_softmax: Callable[..., None] | None = None


current = jax.make_user_context(Looking())


@contextlib.contextmanager
def looking(**fields: Any) -> Iterator[None]:
    """Set fields of `Looking` for all modules that run in this context."""
    with current(dataclasses.replace(current.value, **fields)):
        yield


def capture_of(own: Capture | None) -> Capture | None:
    """Return the capture of a module that has a capture of its own."""
    if current.value.capture is None:
        return own
    WATCHED.add(current.value.watched)
    return current.value.capture if current.value.capture.what else None
