"""Tokens are written into their slots and into no other, wherever a row begins and ends."""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest

from flax_mha.cache import slots

R, K, S, F = 5, 2, 8, 3
NAMES = ("batch", "kv_heads", "cache_length", None)
RNG = np.random.default_rng(0)
# An empty row, rows with one and two free slots, a full one, and one that has gone round a ring.
START = np.array([0, S - 1, S - 2, S, 2 * S + 3], np.int32)


def written(
    before: np.ndarray, tokens: np.ndarray, start: np.ndarray, count: np.ndarray, wraps: bool
) -> np.ndarray:
    """Write token by token."""
    after = before.copy()
    for row in range(R):
        for t in range(count[row]):
            at = int(start[row]) + t
            if wraps or at < S:
                after[row, :, at % S] = tokens[row, :, t]
    return after


@pytest.mark.parametrize(
    ("wraps", "T", "devices"),
    [(False, T, devices) for T in (1, 5, 7) for devices in (1, 4)]
    + [(True, T, 1) for T in (1, 5, 7, 20)],
)
def test_tokens_are_written_into_their_slots(
    wraps: bool, T: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few or many tokens, in plain slots on one or several devices, or in a ring."""
    monkeypatch.setattr(slots, "_FEW", 5)
    start = START if wraps else np.minimum(START, S)
    mesh = jax.make_mesh((devices,), ("slots",), axis_types=(jax.sharding.AxisType.Auto,))
    write = jax.jit(functools.partial(slots.write, names=NAMES, wraps=wraps))
    for count in (np.full(R, T), np.zeros(R, int), np.array([T, 0, min(T, 3), T, T // 2])):
        count = count.astype(np.int32)
        before = RNG.normal(size=(R, K, S, F)).astype(np.float32)
        tokens = RNG.normal(size=(R, K, T, F)).astype(np.float32)
        with jax.set_mesh(mesh), nn.logical_axis_rules([("cache_length", "slots")]):
            after = write(before, tokens, start, count)
        np.testing.assert_array_equal(after, written(before, tokens, start, count, wraps))
