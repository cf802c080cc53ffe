"""The layer's cache beside Flax's: the same numbers, and the documented differences."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.layer.test_flax_parity import KEY, OUTPUT, normal, pair, run
from tests.support.oracle import error


def decoded(layer: nn.Module, params: Any, x: np.ndarray, sizes: list[int]) -> Any:
    """Return the outputs for x given in pieces, and the final cache."""
    room = np.zeros((*x.shape[:-2], 6, x.shape[-1]), x.dtype)
    cache = jax.eval_shape(layer.init, KEY, room)["cache"]
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
    step = jax.jit(partial(layer.apply, mutable=["cache"]))
    outputs = []
    for piece in np.split(x, np.cumsum(sizes)[:-1], axis=-2):
        out, state = step({**params, "cache": cache}, piece)
        cache = state["cache"]
        outputs.append(out)
    return jnp.concatenate(outputs, axis=-2), cache


@pytest.mark.slow
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_decoding_matches_flax_and_causal_forward(batch: tuple[int, ...]) -> None:
    """One token per call as in Flax, and prompts of several tokens."""
    x = normal(*batch, 6, 8)
    theirs, ours, _ = pair(x, num_heads=2, decode=True)
    plain, _, params = pair(x, num_heads=2)
    expected, their_cache = decoded(theirs, params, x, [1] * 6)
    full = run(plain, params, x, mask=np.tril(np.ones((1, 6, 6), bool)[(None,) * len(batch)]))
    assert error(expected, full) < OUTPUT
    for sizes in ([1] * 6, [6], [3, 1, 2]):
        out, cache = decoded(ours, params, x, sizes)
        assert error(out, full) < OUTPUT
        # The documented difference: one KVCache, heads first, with a length for each row.
        held = cache["kv"]
        np.testing.assert_array_equal(held.length, np.full(batch, their_cache["cache_index"]))
        for name, kept in (("cached_key", held.key), ("cached_value", held.value)):
            assert kept.dtype == their_cache[name].dtype
            assert error(jnp.swapaxes(kept, -3, -2), their_cache[name]) < OUTPUT


@pytest.mark.sampled(0.13, slow=0.2)
def test_decoding_beyond_capacity_gives_nan_unlike_flax() -> None:
    """The documented difference: Flax silently overwrites the last slot."""
    x = normal(8, 8)
    _, ours, params = pair(x[:6], num_heads=2, decode=True)
    out, _ = decoded(ours, {"params": params["params"]}, x, [4, 2, 1, 1])
    assert np.isfinite(out[:6]).all()
    assert np.isnan(out[6:]).all()
    with pytest.raises(ValueError, match=r"at most S.* got \(7, 2, 4\) .*; initialize the cache"):
        decoded(ours, {"params": params["params"]}, x, [7, 1])
