"""The context `use`, which sets the kernel and the blocks of all calls in it."""

import contextlib
import contextvars
from collections.abc import Iterator

from flax_mha.base import checks
from flax_mha.kernels import choose
from flax_mha.kernels.call import derivatives
from flax_mha.kernels.call.spec import TileSize

_set: contextvars.ContextVar[tuple[choose.KernelName, TileSize]] = contextvars.ContextVar(
    "flax_mha_use", default=("auto", TileSize())
)


@contextlib.contextmanager
def use(
    kernel: choose.KernelName = "auto", *, block_q: int | None = None, block_k: int | None = None
) -> Iterator[None]:
    """Set the kernel and the blocks of all calls of attention in the context.

    It applies to functions that JAX traces in it, in this thread, such as the calls of a whole
    model. It is part of the key of JAX's caches. Calls that name a kernel keep it. Contexts do not
    add up: the inner one holds. `explain` shows the blocks that a kernel takes.

    >>> with flax_mha.kernels.use("blockwise", block_q=256, block_k=512):
    ...     slope = jax.grad(loss)(params)

    Args:
      kernel: the kernel or strategy of calls with kernel="auto", as in `dot_product_attention`.
      block_q: the queries of a tile, for `flex` on TPUs (a multiple of 128), `blockwise` and
        `checkpointed`. Other kernels refuse a call that has it. By default the kernel chooses.
      block_k: the keys of a tile.

    Raises:
      ValueError: if the kernel is unknown or a size is not positive; in a call, if the kernel can't
        run it.
      RuntimeError: if JAX has no setting to store the context in.
    """
    choose.parse_kernel(kernel)
    checks.optional(block_q=block_q, block_k=block_k)
    token = _set.set((kernel, TileSize(block_q, block_k)))
    try:
        value = f"{kernel}, {block_q}, {block_k}"
        with derivatives.traced_anew("use", value, "name kernel= in each call"):
            yield
    finally:
        _set.reset(token)


def resolve(kernel: choose.KernelName) -> tuple[choose.KernelName, TileSize]:
    """Return a call's kernel, that of the context for "auto", and the blocks of the context."""
    of_context, blocks = _set.get()
    # Another type is refused by `parse_kernel`; an array has no truth value.
    return of_context if isinstance(kernel, str) and kernel == "auto" else kernel, blocks
