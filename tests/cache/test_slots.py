"""Tokens are written into their slots and into no other, wherever a row begins and ends."""

import contextlib
import functools
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha.cache import slots
from flax_mha.cache.kv_cache import KVCache
from flax_mha.kernels.call.stored import OfLayer
from tests.support.platforms import pretend

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


@pytest.fixture(params=["cpu", "tpu"], ids=["tokens", "blocks"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write as for a platform. On TPUs, slots are written in blocks, here of two.

    One token is then written without a loop over rows, and five with one.
    """
    pretend(monkeypatch, request.param)
    monkeypatch.setattr(slots, "_LANES", 2)
    monkeypatch.setattr(slots, "_UNROLLED", R)
    slots._write_shard.clear_cache()  # JAX does not know of the platform.
    yield request.param
    slots._write_shard.clear_cache()


@pytest.mark.parametrize(
    ("wraps", "T", "devices"),
    [(False, T, devices) for T in (1, 5, 7) for devices in (1, 2, 4)]
    + [(True, T, 1) for T in (1, 2, 5, 7, 20)],
)
def test_tokens_are_written_into_their_slots(
    wraps: bool, T: int, devices: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few or many tokens, in plain slots on one or several devices, or in a ring."""
    monkeypatch.setattr(slots, "_FEW", 5)
    start = START if wraps else np.minimum(START, S)
    write = jax.jit(functools.partial(slots.write, names=NAMES, wraps=wraps))
    for count in (np.full(R, T), np.zeros(R, int), np.array([T, 0, min(T, 3), T, T // 2])):
        count = count.astype(np.int32)
        before = RNG.normal(size=(3, R, K, S, F)).astype(np.float32)
        tokens = RNG.normal(size=(R, K, T, F)).astype(np.float32)
        expected = written(before[1], tokens, start, count, wraps)
        with over(devices):
            np.testing.assert_array_equal(write(before[1], tokens, start, count), expected)
            # The same in the second of three layers.
            stack = write(OfLayer(before, jnp.int32(1)), tokens, start, count).stack
        np.testing.assert_array_equal(stack, np.stack([before[0], expected, before[2]]))


def test_only_tpus_write_in_blocks(platform: str) -> None:
    """A scatter copies slots that lie in the lanes of a TPU."""
    write = jax.jit(functools.partial(slots.write, names=NAMES, wraps=False))
    tokens = (jnp.ones((R, K, n, F)) for n in (S, 1))
    with over(1):
        text = write.lower(*tokens, jnp.asarray(START), jnp.asarray(START)).as_text()
    assert ("stablehlo.scatter" in text) == (platform == "cpu")


@pytest.mark.parametrize(("window", "devices"), [(None, 1), (None, 2), (None, 4), (S - 3, 1)])
@pytest.mark.usefixtures("platform")
def test_steps_and_truncation_leave_other_slots_alone(window: int | None, devices: int) -> None:
    """Five tokens, some without a slot or not real, then fewer tokens and one more step."""
    wraps = window is not None
    length = START if wraps else np.minimum(START, S)
    expected = {name: RNG.normal(size=(R, K, S, F)).astype(np.float32) for name in ("key", "value")}
    cache = KVCache.empty((R,), S, K, F, window=window).replace(
        length=jnp.asarray(length), written=jnp.asarray(length) if wraps else None,
        **jax.tree.map(jnp.asarray, expected),
    )  # fmt: skip
    step = jax.jit(KVCache.append, donate_argnums=0)
    # Five tokens into full rows, none into a full row, and what a call without lengths appends.
    for T, lengths in (5, [5, 0, 5, 0, 5]), (1, [1, 1, 0, 1, 1]), (5, [0, 3, 5, 5, 2]), (1, None):
        tokens = {n: RNG.normal(size=(R, T, K, F)).astype(np.float32) for n in expected}
        count = np.full(R, T) if lengths is None else np.array(lengths)
        with over(devices):
            cache = step(cache, **tokens, lengths=None if lengths is None else count)
        for name, before in expected.items():
            new = np.swapaxes(tokens[name], 1, 2)
            expected[name] = written(before, new, length, count, wraps)
            np.testing.assert_array_equal(getattr(cache, name), expected[name])
        # One token fewer than there are, or slots: the next step writes over it.
        length = np.maximum((length + count) if wraps else np.minimum(length + count, S), 1) - 1
        cache = cache.truncate(length)
        np.testing.assert_array_equal(cache.length, length)


@contextlib.contextmanager
def over(devices: int) -> Iterator[None]:
    """Shard the slots of plain caches over some devices."""
    mesh = jax.make_mesh((devices,), ("slots",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), nn.logical_axis_rules([("cache_length", "slots")]):
        yield
