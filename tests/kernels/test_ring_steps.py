"""The steps of a ring: empty ones are left out, and equal ones form a loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import sharding
from flax_mha.base.coordinates import ScoreArray
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.mesh.legs import schedule, split
from flax_mha.kernels.mesh.ring import Ring
from flax_mha.masks import Causal, Mask, Segments, Window


def test_static_parts_of_masks_leave_steps_out() -> None:
    """A window of a block's tokens reaches the block before only, whatever the documents are."""
    dims, rings = Dims((1,), 128, 128, 1, 1, 8, 8), []

    def add_ring(mask: Mask, order: np.ndarray | None = None) -> None:
        spec = AttentionSpec(mask.bind(dims), (), None, None, None, None, 1.0)
        if order is not None:
            q_pos, k_pos = (ScoreArray(order.reshape(shape)) for shape in ((1, 1, -1, 1), (1, -1)))
            spec = spec.replace(q_pos=q_pos, k_pos=k_pos)
        rings.append(Ring.of("model", 8, spec, dims))

    jax.eval_shape(
        lambda ids: add_ring(Causal() & Window(16) & Segments(ids)), jnp.arange(128) // 32
    )
    assert (rings[0].steps, rings[0].traced) == ((0, 1), True)
    # In zigzag order the key before a late piece is on the next device.
    add_ring(Window(8, 0), sharding.zigzag(128, 8))
    assert (rings[1].steps, rings[1].traced) == ((0, 1, 7), False)


@pytest.mark.parametrize(
    ("steps", "legs"),
    [
        ([3], [((3,), 3, 0)]),
        # Blocks come from each device in turn. The first two hops and the last are no loop.
        (
            [0, 1, 2, 3, 4, 5, 6, 7],
            [((0,), 0, 1), ((1,), 1, 1), ((2, 3, 4, 5, 6), 1, 1), ((7,), 1, 0)],
        ),
        # A backward window: hops that no device needs are skipped.
        ([1, 2, 3, 6, 7], [((1,), 1, 1), ((2,), 1, 1), ((3,), 1, 3), ((6,), 3, 1), ((7,), 1, 0)]),
    ],
)
def test_schedule_of_hops(steps: list[int], legs: list[tuple[Any, ...]]) -> None:
    assert schedule(steps, 8) == legs


@pytest.mark.parametrize(
    ("reach", "passes"),
    [
        # The device itself has its keys.
        ({0: (2, 4), 1: (6, 8)}, [((0,), 0, 8), ((1,), 6, 8)]),
        ({0: (0, 8), 1: (0, 8), 2: (5, 8)}, [((0, 1), 0, 8), ((2,), 5, 8)]),
        # The shard of step 1 passes by.
        ({0: (0, 8), 1: (7, 8), 2: (0, 8)}, [((0, 1, 2), 0, 8)]),
        # At most two parts are compiled.
        ({1: (7, 8), 4: (7, 8), 7: (7, 8)}, [((7,), 0, 8), ((4,), 7, 8), ((1,), 7, 8)]),
    ],
)
def test_parts_of_blocks_that_leave_fewer_bytes_on_links(
    reach: dict[int, tuple[int, int]], passes: list[tuple[Any, ...]]
) -> None:
    assert [*split(reach, 8, 8)] == passes
