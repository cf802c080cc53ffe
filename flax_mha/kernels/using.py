"""The context `use`, which sets the kernel, the blocks and the platform of all calls in it."""

import contextlib
import contextvars
from collections.abc import Iterator

from flax_mha.base import checks
from flax_mha.kernels import choose
from flax_mha.kernels.call.spec import TileSize
from flax_mha.sharding import devices

_set: contextvars.ContextVar[tuple[str, TileSize]] = contextvars.ContextVar(
    "flax_mha_use", default=("auto", TileSize())
)


@contextlib.contextmanager
def use(
    kernel: str = "auto", *, block_q: int | None = None, block_k: int | None = None,
    platform: devices.Platform | None = None,
) -> Iterator[None]:  # fmt: skip
    """Set the kernel, the blocks and the platform of all calls of attention in the context.

    It holds for functions that JAX traces in it, in this thread, for example all calls of a model,
    and is part of the key of JAX's caches. Calls that name a kernel keep it. An inner context
    replaces an outer one, except for its platform. `explain` shows the blocks that a kernel takes.

    >>> with flax_mha.kernels.use("blockwise", block_q=256, block_k=512):
    ...     slope = jax.grad(loss)(params)

    `checkpointed` has derivatives of every order and mode, where most kernels have only gradients:

    >>> with flax_mha.kernels.use("checkpointed"):
    ...     product = jax.jvp(jax.grad(loss), (params,), (direction,))[1]

    Export a program for another platform under that platform, one export for each:

    >>> with flax_mha.kernels.use(platform=flax_mha.Platform("tpu", "TPU v5 lite")):
    ...     exported = jax.export.export(jax.jit(loss), platforms=["tpu"])(params)

    Args:
      kernel: the kernel or strategy of calls with kernel="auto", as in `dot_product_attention`.
      block_q: the queries of a tile, for `flex` on TPUs (a multiple of 128), `blockwise` and
        `checkpointed`; other kernels refuse the call. By default the kernel chooses.
      block_k: the keys of a tile.
      platform: the devices that programs are compiled for (default: the ambient mesh's, or this
        process's). Without a mesh it is one device.

    Raises:
      ValueError: if the kernel is unknown or a size is not positive; in a call, if the kernel can't
        run it.
      TypeError: if the platform is not a `Platform`.
      RuntimeError: if JAX has no setting to store the context in.
    """
    choose.parse_kernel(kernel)
    checks.optional(block_q=block_q, block_k=block_k)
    try:
        from jax.experimental.xla_metadata import set_xla_metadata
    except ImportError as error:
        raise RuntimeError(f"use() can't be used: {error}; name kernel= in each call") from None
    # Other metadata makes JAX trace functions again, and does not change the computation.
    value = f"{kernel}, {block_q}, {block_k}, {platform}"
    token = _set.set((kernel, TileSize(block_q, block_k)))
    try:
        with devices.target(platform or devices.target.value), set_xla_metadata(flax_mha_use=value):
            yield
    finally:
        _set.reset(token)


def resolve(kernel: str) -> tuple[str, TileSize]:
    """Return a call's kernel, that of the context for "auto", and the blocks of the context."""
    of_context, blocks = _set.get()
    # Another type is refused by `parse_kernel`; an array has no truth value.
    return of_context if isinstance(kernel, str) and kernel == "auto" else kernel, blocks
