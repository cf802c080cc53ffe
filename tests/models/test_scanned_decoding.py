"""Decoding of a scanned stack, whose layers write their parts of one cache, beside a loop."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import CacheConfig, Decoder, DecoderBlock, MultiHeadAttention, sharding, variants
from flax_mha.masks import Window
from flax_mha.positions import Rotary
from tests.support.meshes import KINDS, on
from tests.support.oracle import random_like

KEY, B, D = jax.random.key(0), 2, 16
RNG = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("small_blocks")
LAYERS: dict[str, Any] = {
    "rotary, grouped": MultiHeadAttention(4, num_kv_heads=2, rotary=Rotary(), decode=True),
    "int8": MultiHeadAttention(4, cache=CacheConfig("int8"), decode=True),
    "ring": MultiHeadAttention(4, mask=Window(3, 0), cache=CacheConfig(slots=6), decode=True),
    "latent": variants.MultiHeadLatentAttention(
        4, head_dim=4, kv_rank=6, rope_dim=4, rotary=Rotary(), decode=True
    ),
    "forgetting": variants.ForgettingAttention(4, decode=True),
    "chosen blocks": variants.ChosenBlocksAttention(4, block=4, count=2, decode=True),
    "talking heads": variants.TalkingHeadsAttention(4, decode=True),
    "differential": variants.DifferentialAttention(4, head_dim=4, decode=True),
}
# A prompt, then single tokens, all with padding: each kind compiles once.
CALLS = [(7, [7, 4]), (1, [1, 1]), (1, [0, 1])]


@functools.partial(jax.jit, static_argnums=0)
def step(model: Any, params: Any, held: Any, x: jax.Array, lengths: Any) -> Any:
    variables = {"params": params, "cache": held}
    y, new = model.apply(variables, x, lengths=lengths, mutable=["cache"])
    return y, new["cache"]


def stacked(tree: Any) -> Any:
    return {"layers": jax.tree.map(lambda *x: np.stack(x), tree["layers_0"], tree["layers_1"])}


def empty(model: Decoder, room: np.ndarray) -> Any:
    shapes = jax.eval_shape(model.init, KEY, room)["cache"]
    held = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    if jax.sharding.get_abstract_mesh().empty:
        return held
    return jax.device_put(held, sharding.of(model.init, KEY, room)["cache"])


def check(layer: MultiHeadAttention) -> None:
    block, room = DecoderBlock(layer, 8), np.zeros((B, 16, D), np.float32)
    loop, scan = (Decoder(2, block, scan=scan, final_norm=False) for scan in (False, True))
    params = random_like(jax.eval_shape(loop.init, KEY, room)["params"])
    held, of_scan = (empty(model, room) for model in (loop, scan))
    params_of_scan = stacked(params)
    for T, lengths in CALLS:
        x, lengths = RNG.normal(size=(B, T, D)).astype(np.float32), np.array(lengths)
        wanted, held = step(loop, params, held, x, lengths)
        got, of_scan = step(scan, params_of_scan, of_scan, x, lengths)
        np.testing.assert_allclose(got, wanted, atol=2e-6)
        pairs = zip(*map(jax.tree.leaves, (of_scan, stacked(held))), strict=True)
        for one, other in pairs:
            one, other = (np.asarray(leaf).astype(np.float32) for leaf in (one, other))
            np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.sampled(0.042)
@pytest.mark.parametrize("name", LAYERS)
def test_scan_decodes_as_a_loop(name: str) -> None:
    check(LAYERS[name])


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", ["rotary, grouped", "int8", "ring"])
def test_scan_decodes_on_a_mesh(name: str, slots: bool, kind: str) -> None:
    """Heads are sharded, or the slots, which rings leave alone."""
    rules = (("cache_length", "model"), ("batch", "data")) if slots else sharding.RULES
    with on(kind, rules, shape=(2, 2)):
        check(LAYERS[name])
