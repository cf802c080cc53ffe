"""The derivatives that each kernel has: a context that asks for all, and errors that name it.

Most kernels have a derivative rule of their own (`jax.custom_vjp`), and JAX applies no forward mode
to such a rule. Its own error tells neither which kernel that was nor which other to take, so the
inputs of these kernels pass through an identity whose derivative says so (see `limits`).
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from flax_mha.base import private_jax

T = TypeVar("T")
# Which derivatives there are: one, in reverse mode; any number in reverse mode; any, of which the
# innermost is in reverse mode; or any number in forward mode.
Limit: TypeAlias = Literal["first", "reverse", "inner", "forward"]

_asked = contextvars.ContextVar("flax_mha_any_derivative", default=False)


@contextlib.contextmanager
def any_derivative() -> Iterator[None]:
    """Let attention take only kernels that have every derivative: any mode, any order.

    Within, `kernel="auto"` takes `reference` for short sequences and `checkpointed`, in memory of
    O(T + S), for all others. It holds for the functions that JAX traces within, in this thread. It
    is part of the key of JAX's caches: a function that was traced outside is traced again.

    >>> with flax_mha.kernels.any_derivative():
    ...     product = jax.jvp(jax.grad(loss), (params,), (direction,))[1]

    Raises:
      ValueError: in a call of attention that names a kernel, or a way to the keys of other devices,
        with a derivative rule of its own.
      RuntimeError: if JAX has no setting that the context can be kept in.
    """
    if reason := private_jax.missing("any_derivative"):
        raise RuntimeError(f"any_derivative() can't be used: {reason}; name kernel='checkpointed'")
    from jax.experimental import xla_metadata as metadata

    token = _asked.set(True)
    try:
        # JAX traces anew under other metadata, which changes nothing that is computed.
        with metadata.set_xla_metadata(flax_mha="any_derivative"):
            yield
    finally:
        _asked.reset(token)


def all_asked() -> bool:
    """Return True within `any_derivative`."""
    return _asked.get()


def limit(allowed: Limit, kernel: str, tree: T) -> T:
    """Return the tree as it is; other derivatives by its traced floats raise a clear error.

    Without the names of JAX that this needs, JAX's own error remains.

    Args:
      allowed: the derivatives that the kernel has.
      kernel: its name, for the error.
      tree: its inputs; for "forward" its results, for reverse mode begins there.
    """
    if private_jax.missing("limits"):
        return tree
    from flax_mha.kernels import limits  # Needs names of JAX that may be gone.

    def mark(x: Any) -> Any:
        # Arrays that are not traced have no derivatives, and should stay known.
        if not isinstance(x, jax.core.Tracer) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return limits.limited.bind(x, allowed=allowed, kernel=kernel)

    return jax.tree.map(mark, tree)
