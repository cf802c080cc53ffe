"""Orders of tokens that balance a ring of devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from flax_mha import MultiHeadAttention, masks, sharding
from flax_mha.base.coordinates import ScoreArray
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.xla.tile_plan import Plan, tile_states
from flax_mha.masks.algebra import resolve
from flax_mha.positions import Rotary
from tests.support.meshes import FOUR, KEY, compare
from tests.support.oracle import random_like

RNG = np.random.default_rng(8)


def documents(length: int, seed: int) -> list[int]:
    """Return the lengths of random documents, of `length` tokens in all."""
    rng, lengths = np.random.default_rng(seed), [0]
    while sum(lengths) < length:
        lengths.append(int(np.ceil(rng.lognormal(7, 1))))
    lengths[-1] -= sum(lengths) - length
    return lengths[1:]


def lockstep(mask: masks.Mask | None, order: np.ndarray, devices: int, tile: int) -> float:
    """Return the time of a ring for tokens in an order, over its time if steps were balanced.

    A device's work in a step is the number of tiles that are not empty, and a step takes as long as
    its busiest device.
    """
    dims = Dims((), len(order), len(order), 1, 1, 1, 1)
    q_pos, k_pos = ScoreArray(order[None, :, None]), ScoreArray(order[None, None, :])
    spec = AttentionSpec(None, (), None, None, q_pos, k_pos, 1.0)
    if mask is not None:
        spec = spec.replace(mask=resolve(mask.bind(dims), spec.at(dims)))
    visible = np.asarray(tile_states(spec, spec.at(dims), Plan(dims, tile, tile)))[0, 0] > 0
    per_device = visible.reshape(devices, len(visible) // devices, devices, -1).sum((1, 3))
    device = np.arange(devices)
    busiest = np.array([per_device[device, device - step].max() for step in device])
    return float(busiest.sum() * devices / per_device.sum())


def test_zigzag_balances_a_causal_mask() -> None:
    natural, zigzag = np.arange(2**13), sharding.zigzag(2**13, 8)
    mask = masks.Causal()
    assert lockstep(mask, zigzag, 8, 128) < 1.01 < 1.8 < lockstep(mask, natural, 8, 128)
    assert sharding.zigzag(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(2))
def test_documents_are_balanced_over_eight_devices(seed: int) -> None:
    """Log-normal documents, 16,384 tokens, tiles of 128."""
    lengths = documents(2**14, seed)
    order = sharding.balanced(lengths, 8, tile=128)
    mask = masks.Causal() & masks.Documents(lengths)
    assert lockstep(mask, order, 8, 128) <= 1.06 < 1.5 < lockstep(mask, np.arange(2**14), 8, 128)


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("mask", [None, masks.Causal() & masks.Window(1024)])
def test_default_pieces_balance_many_devices(mask: Any) -> None:
    """Over 16 devices, pieces of 256 tokens leave a ring that takes 1.11 and 1.14 of the mean."""
    lengths = documents(2**16, 0)
    order = sharding.balanced(lengths, 16, mask=mask)
    mask = (masks.Causal() if mask is None else mask) & masks.Documents(lengths)
    assert lockstep(mask, order, 16, 128) <= 1.1


@pytest.mark.sampled(0.08)
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 5), st.sampled_from([1, 4, 8]), st.sampled_from([None, masks.Window(9, 4)]),
)  # fmt: skip
def test_each_device_gets_equally_many_pieces(
    rows: list[list[int]], devices: int, tile: int, mask: Any
) -> None:
    """It is the same permutation each time, of whole tiles, ascending on each device."""
    size = devices * tile
    T = size * max(-(-sum(row) // size) for row in [*rows, [1]])
    lengths = np.zeros((len(rows), 7), int)
    for row, into in zip(rows, lengths, strict=True):
        into[: len(row)] = row
        into[6] = T - sum(row)
    order = sharding.balanced(lengths, devices, mask=mask, tile=tile)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(T))
    assert (np.diff(order.reshape(-1, tile)) == 1).all()
    assert (np.diff(order.reshape(devices, -1)) > 0).all()
    again = sharding.balanced(jnp.asarray(lengths), devices, mask=mask, tile=tile)
    np.testing.assert_array_equal(order, again)


LENGTHS = [9, 30, 3, 14, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [("ring:reference", "Auto"), ("ring", "Explicit"), ("ring:blockwise", "Explicit")],
)
def test_ring_of_balanced_documents_matches_one_device(kernel: str, kind: str) -> None:
    """The layer's values and gradients, with the order and the lengths traced."""
    layer = MultiHeadAttention(8, kernel=kernel, rotary=Rotary(), use_bias=False)
    x = RNG.normal(size=(2, sum(LENGTHS), 32)).astype(np.float32)
    params = random_like(jax.eval_shape(layer.init, KEY, x))
    order = sharding.balanced(LENGTHS, 4, tile=4)

    def alone(params: Any, x: jax.Array, lengths: jax.Array, order: jax.Array) -> jax.Array:
        return layer.apply(params, x, mask=masks.Causal() & masks.Documents(lengths))

    def in_order(params: Any, x: jax.Array, lengths: jax.Array, order: jax.Array) -> jax.Array:
        mask = masks.Causal() & masks.Documents(lengths)
        out = layer.apply(params, x[:, order], mask=mask, order=order)
        return out[:, jnp.argsort(order)]

    args = params, x, np.asarray(LENGTHS), order
    compare(in_order, args, kind, FOUR, [P()] * 4, alone=alone)
