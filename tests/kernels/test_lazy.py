"""Masks in splash's terms: ids that are exact, functions that stay functions."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info

from flax_mha.base.coordinates import whole
from flax_mha.base.shapes import Dims
from flax_mha.kernels import spec
from flax_mha.kernels.mask_parts import MaskParts, conjuncts
from flax_mha.kernels.splash import mask as splash_mask
from flax_mha.kernels.splash.segment_ids import merge_ids
from flax_mha.masks import Causal, Lengths, Mask, Predicate, Prefix, Segments, Window

EXTREMES = np.array([-(2**31), 2**31 - 1, 0, 1, 2, 3, 4, -1])


@pytest.mark.sampled(0.83)
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_ids_are_exact(lengths: bool, kinds: int) -> None:
    """Whatever the ids: all that int32 holds."""
    rng = np.random.default_rng(4)
    dims = Dims((3,), 20, 24, 1, 1, 1, 1)
    mask: Mask = Segments(rng.choice(EXTREMES, (3, 20)), rng.choice(EXTREMES, (3, 24)))
    for _ in range(kinds - 1):
        mask &= Segments(rng.choice(EXTREMES[:3], 20), rng.choice(EXTREMES[:3], 24))
    if lengths:
        mask &= Lengths(jnp.array([20, 3, 0]), jnp.array([15, 10, 20]))
    mask = mask.bind(dims)
    call = spec.AttentionSpec(mask, (), None, None, None, None, 1.0)
    parts = MaskParts.of(conjuncts(mask))
    assert not parts.others
    q, k = merge_ids(parts, call.at(dims), dims)
    np.testing.assert_array_equal((q[:, :, None] == k[:, None])[:, None], mask.allowed(whole(dims)))


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize(
    "mask",
    [Causal(), Window(1024), Predicate(lambda b, n, i, j: j % 64 <= i), Causal() | Prefix(9)],
    ids=["causal", "window", "predicate", "prefix"],
)
def test_nothing_of_size_t_s_is_made_before_tracing(mask: Mask) -> None:
    length = 2**17
    dims = Dims((), length, length, 8, 8, 64, 64)
    call = spec.AttentionSpec(mask.bind(dims), (), None, None, None, None, 1.0)
    lowered = splash_mask.lower(call, dims, splash_mask.Blocks(512, 512))
    assert not isinstance(lowered, str)
    (known,) = lowered.masks
    info, function = splash_attention_mask_info.process_mask(known, (512, 512))
    assert function is not None
    assert info.partial_mask_blocks is None
    assert sum(x.nbytes for x in info if isinstance(x, np.ndarray)) < 2**20


def test_equal_masks_are_equal() -> None:
    """Splash keeps what it made of a mask for the next layer that has the same."""
    dims = Dims((2,), 300, 300, 2, 2, 8, 8)

    def lowered(mask, dims=dims):
        call = spec.AttentionSpec(mask.bind(dims), (), None, None, None, None, 1.0)
        return splash_mask.lower(call, dims, splash_mask.Blocks(128, 128)).masks[0]

    same = lowered(Causal() & Window(7)), lowered(Causal() & Window(7))
    assert same[0] == same[1]
    assert hash(same[0]) == hash(same[1])
    for other in (lowered(Causal() & Window(8)), lowered(Causal() & Window(7), dims._replace(S=9))):
        assert other != same[0]
