"""Sums over tokens that devices share equal those of one device, and gather a total of each."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import dot_product_attention, masks
from flax_mha.models.attention_mask import read_padding
from flax_mha.sharding.prefix_sums import counts
from flax_mha.variants import ForgettingAttention
from tests.support.meshes import BOTH, EIGHT, KINDS, collectives, compare, compare_model, on

B, T, N, H = 2, 64, 2, 4
RNG = np.random.default_rng(0)
REAL = RNG.random((B, T)) > 0.3
# Some runs end within a shard, some are longer, and an id reappears.
IDS = RNG.integers(0, 3, (B, T // 4)).repeat(4, -1)
RULES = {"data, model": (BOTH, P(None, ("data", "model"))), "model": (EIGHT, P("data", "model"))}
MASKS = {
    "runs": (functools.partial(masks.Segments, runs=True), IDS),
    "documents": (masks.Documents, np.full((B, 8), 7)),
}
each_mesh = pytest.mark.parametrize(
    ("kind", "rules"), [(kind, rules) for kind in KINDS for rules in RULES]
)


@pytest.mark.sampled(0.15)
@each_mesh
def test_padding_is_counted(kind: str, rules: str) -> None:
    def read(tokens: jax.Array, real: jax.Array) -> Any:
        tokens, options = read_padding(tokens, real, {})
        return tokens, options["positions"]

    with on(kind, RULES[rules][0]) as mesh:
        arrays = (jax.device_put(x, NamedSharding(mesh, RULES[rules][1])) for x in (IDS, REAL))
        tokens, positions = jax.jit(read)(*arrays)
        found = jax.device_get((tokens, positions))
    np.testing.assert_array_equal(found[0], np.where(REAL, IDS, 0))
    np.testing.assert_array_equal(found[1], np.where(REAL, np.cumsum(REAL, -1) - 1, 0))


@pytest.mark.sampled(0.08)
@each_mesh
@pytest.mark.parametrize("mask", MASKS)
def test_documents_of_sharded_arrays(mask: str, kind: str, rules: str) -> None:
    """The mask's own array is sharded too."""

    def attend(q: jax.Array, of_mask: jax.Array) -> jax.Array:
        return dot_product_attention(q, q, q, mask=masks.Causal() & make(of_mask))

    make, array = MASKS[mask]
    q = RNG.normal(size=(B, T, N, H)).astype(np.float32)
    over, spec = RULES[rules]
    compare(attend, (q, array), kind, over, [spec, spec])


@pytest.mark.sampled(0.15)
@each_mesh
def test_forgetting_attention(kind: str, rules: str) -> None:
    """The gradient of a key's bias cancels."""
    x = RNG.normal(size=(B, T, 16)).astype(np.float32)
    compare_model(ForgettingAttention(N), x, kind, RULES[rules][0], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_devices_send_only_totals(kind: str, optimized: None) -> None:
    with on(kind, BOTH) as mesh:
        spec = NamedSharding(mesh, P(None, ("data", "model")))
        x = jax.ShapeDtypeStruct((B, T), bool, sharding=spec)
        text = jax.jit(counts).lower(x).compile().as_text()
    assert collectives(text) == [("all-gather", B * 8 * jnp.int32(0).nbytes)]
