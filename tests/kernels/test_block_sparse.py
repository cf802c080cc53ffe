"""Key blocks chosen by data: visited tiles, memory and meshes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention
from flax_mha.base.shapes import attention_dims
from flax_mha.kernels.call.bind import bind_call
from flax_mha.kernels.chips import tpus as blocks_of_tpu
from flax_mha.kernels.flex.tpu import MACHINE
from flax_mha.kernels.flex.traced import divide
from flax_mha.kernels.xla.tile_plan import plan_call, smallest_blocks
from flax_mha.masks import BlockSparse, Causal, Mask, PerHead, Window

N = 4


def planned(mask: Mask, T: int, kernel: Any = plan_call) -> Any:
    """Return the plan of a traced call with N heads and one row."""
    q = jnp.zeros((1, T, N, 8))
    *qkv, spec = bind_call(q, q, q, mask=mask)
    return kernel(spec, attention_dims(*qkv))


@pytest.mark.parametrize("block", [16, 64])
def test_only_chosen_tiles_are_visited(block: int) -> None:
    """One by one. The mask is evaluated only in chosen tiles that the diagonal splits."""
    T = 8 * block
    blocks = np.stack([[0, 5, 5, i] for i in range(8)])

    @jax.jit
    def tables(blocks: jax.Array) -> Any:
        plan, actual = planned(Causal() & BlockSparse(blocks, block, block), T)
        assert (plan.block_q, plan.block_k) == (block, block)
        return actual

    order, full, some = jax.tree.map(np.asarray, tables(jnp.asarray(blocks)))
    for i in range(8):
        expected = {j for j in (0, 5, i) if j <= i}
        assert {*order[0, 0, i, : some[0, 0, i]].tolist()} == expected
        assert {*order[0, 0, i, : full[0, 0, i]].tolist()} == expected - {i}


def test_smallest_blocks_of_combined_masks() -> None:
    one, other = BlockSparse([[0]], 64, 128), BlockSparse([[0]], 32, 256)
    assert (
        smallest_blocks(Causal() & one)
        == smallest_blocks(one)
        == smallest_blocks(~one)
        == (64, 128)
    )
    assert (
        smallest_blocks(one | other)
        == smallest_blocks(PerHead([Causal(), one, other, one]))
        == (32, 128)
    )
    assert smallest_blocks(None) is smallest_blocks(Causal() | Window(3)) is None


@pytest.mark.parametrize(
    ("grain", "tiles"),
    [
        ((1, 64), (64, 64)),
        ((10, 2000), (70, 500)),
        ((300, 600), (300, 300)),
        ((5000, 4), (500, 64)),
    ],
)
def test_tiles_hold_whole_blocks_or_parts_of_one(grain: Any, tiles: Any) -> None:
    @jax.jit
    def plan(blocks: jax.Array) -> None:
        found, _ = planned(BlockSparse(blocks, *grain), 2000)
        assert (found.block_q, found.block_k) == tiles

    plan(jnp.zeros((1, 2), int))


@pytest.mark.slow
def test_memory_is_linear_in_chosen_keys(optimized: None) -> None:
    """Twice the tokens, with as many chosen keys each, take twice the memory and no pair table."""

    def compiled(T: int) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array, blocks: jax.Array) -> jax.Array:
            mask = Causal() & BlockSparse(blocks, 64, 64)
            return jnp.sum(dot_product_attention(q, k, v, mask=mask, kernel="blockwise"))

        x = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)
        blocks = jax.ShapeDtypeStruct((1, 1, T // 64, 4), jnp.int32)
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, blocks).compile()

    small, large = (compiled(T).memory_analysis().temp_size_in_bytes for T in (2048, 4096))
    assert large < 2.2 * small
    assert large < 4096**2


def test_tpu_tiles_are_as_small_as_tables_allow() -> None:
    kernel = functools.partial(divide, machine=MACHINE, device="")

    def tiles(T: int, *grain: int) -> tuple[int, int]:
        plan = planned(BlockSparse(np.zeros((1, 1), int), *grain), T, kernel)[0]
        return plan.block_q, plan.block_k

    most = max(blocks_of_tpu.BLOCKS.values())
    assert tiles(4096, 64, 64) == (128, 128)
    assert tiles(4096, 200, 64) == (256, 128)
    assert tiles(4096, 10**6, 10**6) == (most, most)
    # The table has no room for N heads of 256² tiles.
    assert tiles(32768, 64, 64) == (256, 256)
