"""The derivatives of each kernel: the context `any_derivative`, and clear errors.

Most kernels have a custom derivative rule (`jax.custom_vjp`), which JAX does not apply in forward
mode. JAX's error does not name the kernel or an alternative. So the inputs of these kernels pass
through an identity whose derivative raises a clear error (see `limits`).
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from flax_mha.base import private_jax

T = TypeVar("T")
# The derivatives that a kernel has: one in reverse mode; any number in reverse mode; any number,
# the innermost in reverse mode; or any number in forward mode.
Limit: TypeAlias = Literal["first", "reverse", "inner", "forward"]

_asked = contextvars.ContextVar("flax_mha_any_derivative", default=False)


@contextlib.contextmanager
def any_derivative() -> Iterator[None]:
    """Make attention use only kernels that have every derivative, of any mode and order.

    Within the context, `kernel="auto"` takes `reference` for short sequences, and `checkpointed`,
    in O(T + S) memory, for others. It applies to functions that JAX traces in it, in this thread.
    It is part of the key of JAX's caches, so functions that were traced outside are traced again.

    >>> with flax_mha.kernels.any_derivative():
    ...     product = jax.jvp(jax.grad(loss), (params,), (direction,))[1]

    Raises:
      ValueError: in a call of attention that names a kernel or strategy with a custom derivative
        rule.
      RuntimeError: if JAX has no setting to store the context in.
    """
    token = _asked.set(True)
    try:
        with traced_anew("any_derivative", "True", "name kernel='checkpointed'"):
            yield
    finally:
        _asked.reset(token)


@contextlib.contextmanager
def traced_anew(context: str, value: str, remedy: str) -> Iterator[None]:
    """Make JAX trace functions again that were traced outside a context with this value.

    Raises:
      RuntimeError: if JAX lacks the setting; it names the context and the remedy.
    """
    if reason := private_jax.missing("any_derivative"):
        raise RuntimeError(f"{context}() can't be used: {reason}; {remedy}")
    from jax.experimental import xla_metadata as metadata

    # Other metadata makes JAX trace again, and does not change the computation.
    with metadata.set_xla_metadata(**{f"flax_mha_{context}": value}):
        yield


def all_asked() -> bool:
    """Return True within `any_derivative`."""
    return _asked.get()


def limit(allowed: Limit, kernel: str, tree: T) -> T:
    """Return the tree unchanged, but raise a clear error for derivatives that are not allowed.

    The tree holds the inputs of a kernel, or for "forward" its results, where reverse mode begins.
    If JAX lacks the names that this needs, its own error remains.
    """
    if private_jax.missing("limits"):
        return tree
    from flax_mha.kernels.call import limits  # Uses names that a future JAX may lack.

    def mark(x: Any) -> Any:
        # Arrays that are not traced have no derivatives, and should stay static.
        if not isinstance(x, jax.core.Tracer) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return limits.limited.bind(x, allowed=allowed, kernel=kernel)

    return jax.tree.map(mark, tree)
