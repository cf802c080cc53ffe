"""Key blocks chosen by data: visited tiles, memory and meshes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention
from flax_mha.base.shapes import attention_dims
from flax_mha.kernels.call.bind import bind_call
from flax_mha.kernels.xla.tile_plan import plan_call
from flax_mha.masks import BlockSparse, Causal


@pytest.mark.parametrize("block", [16, 64])
def test_only_chosen_tiles_are_visited(block: int) -> None:
    """One by one. The mask is evaluated only in chosen tiles that the diagonal splits."""
    T = 8 * block
    blocks = np.stack([[0, 5, 5, i] for i in range(8)])

    @jax.jit
    def tables(blocks: jax.Array) -> Any:
        q = jnp.zeros((1, T, 4, 8))
        *qkv, spec = bind_call(q, q, q, mask=Causal() & BlockSparse(blocks, block, block))
        plan, actual = plan_call(spec, attention_dims(*qkv))
        assert (plan.block_q, plan.block_k) == (block, block)
        return actual

    order, full, some = jax.tree.map(np.asarray, tables(jnp.asarray(blocks)))
    for i in range(8):
        expected = {j for j in (0, 5, i) if j <= i}
        assert {*order[0, 0, i, : some[0, 0, i]].tolist()} == expected
        assert {*order[0, 0, i, : full[0, 0, i]].tolist()} == expected - {i}


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
