"""Masks of the numbers 1 and 0, as Flax's helpers return them, and of other numbers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import MultiHeadAttention, dot_product_attention, masks
from flax_mha.base.coordinates import tiles_of, whole
from flax_mha.base.shapes import Dims
from flax_mha.masks.algebra import resolve
from tests.support.arrays import random_variables
from tests.support.decoding import decoded
from tests.support.meshes import KINDS, on
from tests.support.oracle import error

B, T, N, H = 2, 5, 4, 4
RNG = np.random.default_rng(0)
Q, K, V = RNG.normal(size=(3, B, T, N, H)).astype(np.float32)
X = RNG.normal(size=(B, 7, 8)).astype(np.float32)
LENGTHS = np.array([3, 5])
# Row 0 has three tokens: its last queries are fully masked.
REAL = np.arange(T) < LENGTHS[:, None]
# Equals nn.combine_masks(nn.make_attention_mask(REAL, REAL), nn.make_causal_mask(REAL)).
BOOLS = np.tril(REAL[:, None, :, None] & REAL[:, None, None, :])
TABLE = jax.device_put(BOOLS.astype(np.float32))


DIMS = Dims((B,), T, T, N, N, H, H)


def attend(mask: Any, **call: Any) -> Any:
    return dot_product_attention(Q, K, V, mask=mask, **call)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_zeros_and_ones_become_bools(dtype: str) -> None:
    """They stay NumPy arrays where they can be read, so that kernels know them at trace time."""
    assert TABLE.dtype == jnp.float32
    for given in (TABLE.astype(dtype), np.asarray(TABLE).astype(dtype)):
        bound = masks.as_mask(given).bind(DIMS)
        assert isinstance(bound.array.array, np.ndarray)
        inside = jax.jit(lambda m=given: masks.as_mask(m).bind(DIMS))()
        for mask in (bound, inside):
            assert mask.array.array.dtype == bool
            np.testing.assert_array_equal(mask.array.array, BOOLS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_tiles_of_traced_numbers(dtype: str) -> None:
    """A tile with another number is neither empty nor full."""
    table = jnp.asarray([[0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 2, -1]], dtype)

    @jax.jit
    def states(table: jax.Array) -> jax.Array:
        dims = Dims((), 2, 6, 1, 1, H, H)
        at = whole(dims)
        mask = resolve(masks.as_mask(table).bind(dims), at)
        return mask.tiles(tiles_of(at.q, at.k, 1, 2))

    assert states(table)[0].tolist() == [
        [masks.EMPTY, masks.FULL, masks.PARTIAL], [masks.EMPTY, masks.FULL, masks.PARTIAL],
    ]  # fmt: skip
    assert states(table + 2).tolist() == [[[masks.PARTIAL] * 3] * 2]


INVALID = np.asarray(TABLE).copy()
INVALID[1, 0, 2, 1] = -2.0
WRONG = np.zeros((B, T), bool)
WRONG[1, 2] = True
ADDITIVE = np.where(BOOLS, 0.0, -1e9).astype(np.float32)


@pytest.mark.sampled(0.13)
@pytest.mark.parametrize(
    ("mask", "wrong"),
    [
        (lambda m: m, WRONG),
        (lambda m: ~masks.as_mask(m), WRONG),
        (lambda m: masks.Causal() & ~(m & masks.Causal()), WRONG),
        (lambda m: masks.PerHead([m] * N), WRONG),
        (lambda m: m & masks.Lengths(jnp.array([3, 0])), WRONG),
        (lambda m: jnp.where(m == -2, jnp.nan, m), WRONG),
        (lambda m: jnp.where(m == -2, 1e-9, m), WRONG),
    ],
    ids=["as given", "not", "nested", "per head", "of an empty row", "NaN", "nearly 0"],
)
def test_invalid_traced_numbers_give_nan_in_their_rows(
    mask: Callable[..., Any], wrong: Any
) -> None:
    """Every output of the affected queries is NaN, and no other."""

    def run(table: jax.Array) -> Any:
        out, weights, lse = attend(mask(table), return_weights=True, return_residuals=True)
        return out, jnp.swapaxes(weights, 1, 2), jnp.swapaxes(lse, 1, 2)

    results = jax.jit(run)(jnp.asarray(INVALID))
    valid = jax.jit(run)(jnp.asarray(np.where(np.equal(INVALID, -2), 1.0, INVALID)))
    for got, expected in zip(results, valid, strict=True):
        assert np.isnan(got[wrong]).all()
        np.testing.assert_array_equal(got[~wrong], expected[~wrong])


def test_additive_masks_are_refused_or_give_nan() -> None:
    """Masks of 0 and −1e9 are never read the wrong way round. Gradients of values are NaN too."""
    allowed = np.broadcast_to(np.asarray(TABLE) > 0, (B, N, T, T))

    def loss(v: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = dot_product_attention(Q, K, v, mask=mask)
        return out.sum(), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(V, ADDITIVE)
    forbids = ~allowed.all(-1).swapaxes(1, 2)
    np.testing.assert_array_equal(np.isnan(out).all(-1), forbids)
    assert np.isnan(grads).any()
    for known in (ADDITIVE, np.asarray(ADDITIVE)):
        with pytest.raises(
            ValueError, match=r"of 1 \(may attend\) and 0, got -1000000000.0 in float"
        ):
            jax.jit(lambda v, m=known: loss(v, m)[0])(V)


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("kind", KINDS)
def test_numeric_masks_on_meshes(kind: str) -> None:
    """Sharded over rows and queries, concrete and traced. Invalid numbers are detected too."""
    expected = attend(jnp.asarray(BOOLS))
    with on(kind) as mesh:
        put = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (Q, K, V, TABLE, INVALID)]
        q, k, v, table, invalid = put
        run = jax.jit(lambda q, k, v, m: dot_product_attention(q, k, v, mask=m))
        traced, wrong = jax.device_get((run(q, k, v, table), run(q, k, v, invalid)))
        known = jax.device_get(jax.jit(lambda q, k, v: run(q, k, v, TABLE))(q, k, v))
    assert error(traced, expected) < 2e-6
    assert error(known, expected) < 2e-6
    np.testing.assert_array_equal(np.isnan(wrong).all((2, 3)), WRONG)
    assert error(wrong[~WRONG], expected[~WRONG]) < 2e-6


@pytest.mark.sampled(0.15)
def test_decoding_with_numeric_mask_of_all_slots() -> None:
    """Each step gets the mask of all slots, which outnumber the tokens."""
    layer, keep = MultiHeadAttention(2), np.float32([1, 0, 1, 1, 1, 1, 1])
    params = random_variables(layer, X)
    full = jax.jit(partial(layer.apply, mask=masks.Causal() & (keep > 0)))(params, X)
    steps = decoded(layer.clone(decode=True), params, X, mask=keep[None])
    assert error(steps, full) < 2e-6
