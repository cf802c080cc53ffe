"""Kernels that are traced once for all layers that call them alike."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn(static, *arrays), traced anew only for another `static`, shape or dtype.

    What was traced is inlined: XLA sees no call. The layers of a stack are so traced in a fraction
    of the time, forward and backward.

    Args:
      fn: whose first argument is known before tracing. Where that is not `pure`, for it holds
        functions of a user's, which may read what changes, fn is traced each time.
    """
    shared = jax.jit(fn, static_argnums=0, inline=True)

    @functools.wraps(fn)
    def call(static: Any, *arrays: Any) -> Any:
        return (shared if static.pure else fn)(static, *arrays)

    return call
