"""The context in which modules show their named tensors."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from flax_mha.kernels import Capture


@dataclasses.dataclass(frozen=True)
class Looking:
    """The values that modules in a context capture, and functions that they call.

    JAX shares traces between equal values. Functions are equal only to themselves.

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
    with _context(dataclasses.replace(current(), **fields)):
        yield


def capture_of(own: Capture | None) -> Capture | None:
    """Return the capture of a module that has a capture of its own."""
    capture = current().capture or own
    return capture if capture and capture.what else None
