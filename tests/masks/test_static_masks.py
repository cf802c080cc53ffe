"""Masks whose arrays are known at trace time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.bind import bind_call
from flax_mha.kernels.xla.tile_plan import plan_call
from flax_mha.masks import Causal, Dense, Lengths, Mask, Prefix, Segments, Window

B, N = 2, 3


KNOWN = {
    "dense": lambda x: Dense(x % 3 > 0),
    "lengths": lambda x: Lengths(x[:, 0, 0, 0] + 9, x[:, 0, 0, 0] + 99),
    "segments": lambda x: Segments(x[:, 0, :, 0] // 40, x[:, 0, 0] // 40),
    "prefix": lambda x: Prefix(x[:, 0, 0, 0]),
    "prefix_of_all": lambda x: Prefix(x[0, 0, 0, 0]),
    "combined": lambda x: Causal() & ~Dense(x % 3 > 0) | Segments(x[:, 0, :, 0] // 40),
}


@pytest.mark.parametrize("name", KNOWN)
def test_closed_over_jax_arrays_are_static(name: str) -> None:
    """JAX arrays in a jitted function's closure are read while tracing, like NumPy arrays."""
    dims = Dims((B,), 300, 300, N, N, 4, 4)
    array = jnp.asarray(np.random.default_rng(0).integers(0, 300, (B, 1, 300, 300)), jnp.int32)
    mask = KNOWN[name](array)
    positions = jnp.arange(300) + 7
    tables = []

    @jax.jit
    def plan_it(x: jax.Array) -> jax.Array:
        *_, spec = bind_call(x, x, x, mask=mask, q_positions=positions, kv_positions=positions)
        tables.append(plan_call(spec, dims))
        return x

    plan_it(jnp.zeros((B, 300, N, 4)))
    for x in jax.tree.leaves(tables):
        assert not isinstance(x, jax.Array)


def test_sharded_mask_arrays_stay_on_their_mesh() -> None:
    mesh = jax.make_mesh((B,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:B])
    at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    ids = jax.device_put(jnp.zeros((B, 6), jnp.int32), at)
    assert isinstance(Segments(ids).bind(Dims((B,), 6, 6, N, N, 4, 4)).q.array, jax.Array)


@pytest.mark.parametrize(
    ("mask", "shown", "share"),
    [
        (lambda n: Causal() & Lengths(n), Causal(), 0.75),
        (lambda n: Lengths(n) & Window(left=40) & Causal(), Window(40, 0), 0.4375),
        (lambda n: Causal() | Lengths(n), Window(), 1),
        (Lengths, Window(), 1),
    ],
)
def test_static_parts_of_traced_masks_hide_tiles(mask: Any, shown: Mask, share: float) -> None:
    """In short calls. In others, tiles are visited one by one, as the traced parts say."""
    plan, lists = plan_traced(mask, 512)
    assert lists is None
    keys = sum(len(part.starts) * part.width for part in plan.key_ranges) * plan.block_k
    assert keys * plan.block_q == share * 512**2
    # Each block of queries visits all keys that the static part shows.
    for part in plan.key_ranges:
        assert part.masked
        for block, start in enumerate(part.starts, part.first):
            rows = shown.dense(512)[0, block * plan.block_q : (block + 1) * plan.block_q]
            seen = np.flatnonzero(rows.any(0)) // plan.block_k
            assert start <= seen.min()
            assert seen.max() < start + part.width
    assert plan_traced(mask, 1025)[1] is not None


def plan_traced(mask: Any, T: int) -> Any:
    """Return the plan of a call with a mask of traced numbers of rows, and its visit lists."""
    x, plans = jax.ShapeDtypeStruct((B, T, N, 4), jnp.float32), []

    def plan_it(x: jax.Array, numbers: jax.Array) -> jax.Array:
        *_, spec = bind_call(x, x, x, mask=mask(numbers))
        plans.append(plan_call(spec, Dims((B,), T, T, N, N, 4, 4)))
        return x

    jax.eval_shape(plan_it, x, jax.ShapeDtypeStruct((B,), jnp.int32))
    return plans[0]
