"""Masks in splash's terms: functions that stay functions."""

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info

from flax_mha.base.coordinates import ScoreArray
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call import spec
from flax_mha.kernels.splash import computed_mask as splash_mask
from flax_mha.kernels.xla.tile_plan import Plan
from flax_mha.masks import Causal, Window


@pytest.mark.parametrize("shift", [0, 1000])
def test_block_states_match_the_table(shift: int) -> None:
    """A query block that sees no key visits one block."""
    dims, blocks = Dims((), 500, 600, 1, 1, 8, 8), (128, 256)
    i, j = np.arange(500)[:, None] - shift, np.arange(768)
    call = spec.AttentionSpec(
        (Causal() & Window(130)).bind(dims), (), None, None, ScoreArray(i[None]), None, 1.0
    )
    lowered = splash_mask.lower(call, Plan(dims, *blocks))
    assert not isinstance(lowered, str)
    mask = lowered[1]
    allowed = (j <= i) & (j >= i - 130) & (j < 600)
    some = np.pad(allowed, ((0, 12), (0, 0))).reshape(4, 128, 3, 256).any((1, 3))
    some[0, 0] |= not some.any()
    table = splash.MultiHeadMask([splash.NumpyMask(np.kron(some, np.ones(blocks)) > 0)])
    for process in (mask_info.process_mask, mask_info.process_mask_dkv):
        got, function = process(splash.MultiHeadMask([mask]), blocks)
        want, _ = process(table, blocks)
        np.testing.assert_array_equal(got.data_next, want.data_next)
        np.testing.assert_array_equal(got.block_mask > 0, want.block_mask > 0)
        assert got.partial_mask_blocks is None
        at = (np.broadcast_to(x, allowed.shape) for x in (i, j))
        np.testing.assert_array_equal(function(*at), allowed)
