"""The synchronisation of the kernels for Hopper: buffers that a producer fills, and matmuls.

Only this file waits, commits, arrives at barriers and starts matmuls, always in the order

    wait for a buffer; store the weights; commit; wgmma; wait for it; release the buffer

Tensor cores read shared memory asynchronously: they see only committed stores, and would read a
buffer that is released too early while it is overwritten.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# The layouts of a tile in registers, and of a number per row, or per column.
TILE = plgpu.Layout.WGMMA
ROWS, COLUMNS = TILE.reduce(1), TILE.reduce(0)


class BufferRing(NamedTuple):
    """Buffers that the producer fills by turns, each when all consumers have released it.

    Attributes:
      buffers: [stages, rows, features] in shared memory.
      ready: the barriers of filled buffers.
      free: the barriers of released buffers.
    """

    buffers: Any
    ready: Any
    free: Any

    def _slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.buffers.shape[0]))

    def fill(self, step: jax.Array, source: Any) -> None:
        """Copy a block of global memory into the buffer of a step, once it is free."""
        slot = self._slot(step)

        @pl.when(step >= self.buffers.shape[0])
        def _() -> None:
            plgpu.barrier_wait(self.free.at[slot])

        plgpu.copy_gmem_to_smem(source, self.buffers.at[slot], self.ready.at[slot])

    def drain(self, steps: jax.Array) -> None:
        """Wait until the consumers have released the buffers of the last steps."""
        first = jnp.maximum(steps - self.buffers.shape[0], 0)

        @pl.loop(first, steps)
        def _(step: jax.Array) -> None:
            plgpu.barrier_wait(self.free.at[self._slot(step)])

    def wait(self, step: jax.Array) -> Any:
        """Return the buffer of a step, once it is filled."""
        slot = self._slot(step)
        plgpu.barrier_wait(self.ready.at[slot])
        return self.buffers.at[slot]

    def release(self, step: jax.Array) -> None:
        """Let the producer overwrite the buffer of a step. No matmul may still read it."""
        plgpu.barrier_arrive(self.free.at[self._slot(step)])


def load_once(pairs: Iterable[tuple[Any, Any]], barrier: Any) -> None:
    """Copy blocks of global memory to shared memory, and wait for them."""
    for source, buffer in pairs:
        plgpu.copy_gmem_to_smem(source, buffer, barrier)
    plgpu.barrier_wait(barrier)


def multiply(a: Any, b: Any, start: jax.Array | None = None) -> jax.Array:
    """Return start + a·b in float32, of arrays in shared memory, which can be overwritten then.

    The product is added in the registers of `start`: one of its own would take as many again.
    """

    def product(acc: Any) -> jax.Array:
        if start is not None:
            acc[...] = start
        plgpu.wgmma(acc, a, b)
        return acc[...]  # This waits for the matmul.

    return pl.run_scoped(product, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def add_product(sums: jax.Array, weights: jax.Array, buffer: Any, b: Any) -> jax.Array:
    """Return sums + weights·b, by way of a buffer in shared memory."""
    buffer[...] = weights.astype(buffer.dtype)
    plgpu.commit_smem()
    return multiply(buffer, b, sums)


def producer_and_consumers(
    consumers: int, registers: tuple[int, int], produce: Callable[[], None],
    consume: Callable[[jax.Array], None],
) -> None:  # fmt: skip
    """Run the consumers on all warpgroups but the last one, which is the producer."""
    wg = lax.axis_index("wg")

    @pl.when(wg < consumers)
    def _() -> None:
        plgpu.set_max_registers(registers[0], action="increase")
        consume(wg)

    @pl.when(wg == consumers)
    def _() -> None:
        plgpu.set_max_registers(registers[1], action="decrease")
        produce()
