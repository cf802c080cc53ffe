"""The frame of a kernel for Hopper: its grid, its lists of tiles, and the arrays that tiles read.

A block of the grid is a block of queries of a head, which visits tiles of keys, or a block of keys
of a key/value head, which visits tiles of queries. `own` is the side of the block, `other` the side
that it visits. The longest blocks come first, because one that begins last would run alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flax_mha.kernels.flex.hopper.block import (
    BLOCK,
    CONSUMERS,
    REGISTERS,
    ROW,
    BlockTiles,
    Size,
    entry_at,
    hidden_zero,
)
from flax_mha.kernels.flex.hopper.sync import BufferRing, load_once, producer_and_consumers
from flax_mha.kernels.flex.passes import Arrays
from flax_mha.kernels.flex.tile import FlexCall
from flax_mha.kernels.xla.tile_plan import make_visit_lists
from flax_mha.masks.states import is_static


def _lists(states: jax.Array, by_query: bool, group: int) -> list[jax.Array]:
    """Return the visited tiles, the numbers of full ones and of all, and the order of blocks."""
    states = states if by_query else states.swapaxes(-1, -2)
    visited, full, some = make_visit_lists(states)
    xp: Any = np if is_static(states) else jnp
    work = some
    if not by_query and some.shape[1] > 1:
        work = some.reshape(some.shape[0], -1, group, some.shape[-1]).sum(2)
    order = xp.argsort(-work, axis=-1, stable=True).astype(np.int32)
    return [jnp.asarray(x) for x in (visited, full, some, order)]


def _scratch(
    size: Size, dtype: Any, own: Sequence[jax.Array], other: Sequence[jax.Array]
) -> dict[str, Any]:
    """Return the buffers and barriers of a kernel, under the names of its arguments."""

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=size.transforms)

    ready = plgpu.Barrier(num_barriers=size.stages)
    free = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=size.stages)
    return {
        "blocks": [shared(CONSUMERS, ROW, y.shape[-1]) for y in own],
        "loaded": plgpu.Barrier(num_arrivals=len(own), num_barriers=CONSUMERS),
        "rings": [
            BufferRing(shared(size.stages, size.step, y.shape[-1]), ready, free) for y in other
        ],
        "weights": shared(CONSUMERS, ROW, size.step),
    }


def _produce(
    here: Callable[[], BlockTiles], rings: Sequence[BufferRing], sources: Sequence[Any]
) -> None:
    """Load the blocks of the other side, step by step."""
    block = here()

    def step(masked: bool, number: Any, g: Any, start: Any, carry: Any) -> Any:
        at = block.r, block.other_head(g), pl.ds(start, block.size.step)
        for ring, source in zip(rings, sources, strict=True):
            ring.fill(number, source.at[at])
        return carry

    steps, _ = block.each(step, None)
    for ring in rings:
        ring.drain(steps)


def run(
    call: FlexCall, x: Arrays, by_query: bool, size: Size, name: str, own: Sequence[jax.Array],
    other: Sequence[jax.Array], more: Sequence[jax.Array], outputs: Sequence[Any], body: Callable,
) -> Any:  # fmt: skip
    """Run body(block, first, own, rings, buffer, more, outputs) in the consumers of each block.

    `own` and `other` are [R, ·, length, F] arrays whose blocks are loaded to shared memory, once or
    in rings. `more` are arrays in global memory. The buffer [64, step] is for weights.
    """
    states, group = x.states, call.plan.dims.G
    lists = _lists(states, by_query, group)
    operands = [*zip(call.closed, x.closed, strict=True), *zip(call.leaves, x.leaves, strict=True)]
    stored = [
        y.swapaxes(-1, -2) if operand.layout == "tile" and not by_query else y
        for operand, y in operands
    ]
    R, M, length = own[0].shape[:3]

    def kernel(
        lists: Any, indices: Any, arrays: Any, mine: Any, theirs: Any, extra: Any, *outs: Any,
        blocks: Any, loaded: Any, rings: Any, weights: Any,
    ) -> None:  # fmt: skip
        def here() -> BlockTiles:
            b = lax.axis_index("block")
            rank, line = lax.div(b, jnp.int32(R * M)), lax.rem(b, jnp.int32(R * M))
            r, h = lax.div(line, jnp.int32(M)), lax.rem(line, jnp.int32(M))
            i = entry_at(lists[3], r, h, rank)[...]
            return BlockTiles(call, size, by_query, r, h, i, lists, indices, arrays)

        def consume(wg: jax.Array) -> None:
            block = here()
            first = block.i * BLOCK + wg * ROW
            sources = (source.at[block.r, block.h, pl.ds(first, ROW)] for source in mine)
            pairs = zip(sources, (buffer.at[wg] for buffer in blocks), strict=True)
            load_once(pairs, loaded.at[wg])

            def again(n: int, start: jax.Array) -> Any:
                return blocks[n].at[wg + hidden_zero(start)]

            body(block, first, again, rings, weights.at[wg], extra, outs)

        produce = functools.partial(_produce, here, rings, theirs)
        producer_and_consumers(CONSUMERS, REGISTERS, produce, consume)

    kernel.__name__ = name
    return plgpu.kernel(
        kernel, out_type=list(outputs), scratch_types=_scratch(size, own[0].dtype, own, other),
        grid=(R * M * (length // BLOCK),), grid_names=("block",), num_threads=CONSUMERS + 1,
        thread_name="wg", compiler_params=plgpu.CompilerParams(approx_math=True),
    )(lists, [x.rows, x.heads], stored, own, other, more)  # fmt: skip


def padded(x: jax.Array) -> jax.Array:
    """Return [..., F] with features padded to a multiple of 64."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 64)])
