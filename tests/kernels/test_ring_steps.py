"""The steps of a ring that a static mask empties are left out."""

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import sharding
from flax_mha.base.coordinates import ScoreArray
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.spec import AttentionSpec
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
