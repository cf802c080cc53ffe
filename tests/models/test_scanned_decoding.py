"""Decoding of a scanned stack, whose layers write their parts of one cache, beside a loop."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
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
# A long call, one for `decode` with padding, and single tokens: each kind compiles once.
CALLS: list[tuple[int, Any]] = [(7, None), (1, None), (3, [3, 1]), (1, None)]


def both(layer: MultiHeadAttention, cross: MultiHeadAttention | None, remat: bool) -> Any:
    """Return a loop and a scan of two blocks, and the variables of each, with equal numbers."""
    block = DecoderBlock(layer, 8, cross_attention=cross, remat=remat)
    loop, scan = (Decoder(2, block, scan=scan, final_norm=False) for scan in (False, True))
    x = jnp.zeros((B, 16, D))
    memory = () if cross is None else (jnp.asarray(RNG.normal(size=(B, 5, D)), jnp.float32),)
    params = random_like(jax.eval_shape(loop.init, KEY, x, *memory)["params"])
    held, of_scan = (sharding.init(model, KEY, x, *memory)["cache"] for model in (loop, scan))

    def stacked(tree: Any) -> Any:
        return {"layers": jax.tree.map(lambda *x: jnp.stack(x), tree["layers_0"], tree["layers_1"])}

    return (loop, params, held), (scan, stacked(params), of_scan), memory, stacked


@functools.partial(jax.jit, static_argnums=0)
def step(model: Any, params: Any, held: Any, *inputs: jax.Array, **call: Any) -> Any:
    variables = {"params": params, "cache": held}
    y, new = model.apply(variables, *inputs, **call, mutable=["cache"])
    return y, new["cache"]


def check(
    layer: MultiHeadAttention, cross: MultiHeadAttention | None = None, remat: bool = False
) -> None:
    (loop, params, held), (scan, stacked_params, stacked_held), memory, stacked = both(
        layer, cross, remat
    )
    for T, lengths in CALLS:
        x = jnp.asarray(RNG.normal(size=(B, T, D)), jnp.float32)
        call = {} if lengths is None else {"lengths": jnp.asarray(lengths)}

        wanted, held = step(loop, params, held, x, *memory, **call)
        got, stacked_held = step(scan, stacked_params, stacked_held, x, *memory, **call)
        np.testing.assert_allclose(got, wanted, atol=2e-6)
        memory = () if cross is None or cross.decode else memory
        for one, other in zip(
            jax.tree.leaves(stacked_held), jax.tree.leaves(stacked(held)), strict=True
        ):
            np.testing.assert_allclose(
                np.asarray(one, np.float32), np.asarray(other, np.float32), atol=1e-4
            )


@pytest.mark.sampled(0.07, slow=0.3)
@pytest.mark.parametrize("name", LAYERS)
def test_scan_decodes_as_a_loop(name: str) -> None:
    check(LAYERS[name])


@pytest.mark.sampled(0.1, slow=0.2)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_scan_sees_an_encoders_output(keeps: bool, remat: bool) -> None:
    """Cross-attention keeps the keys of the first call, or each call gives the output again."""
    check(LAYERS["rotary, grouped"], MultiHeadAttention(2, decode=keeps), remat)


@pytest.mark.sampled(0, slow=0.3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", ["rotary, grouped", "int8", "ring"])
def test_scan_decodes_on_a_mesh(name: str, slots: bool, kind: str) -> None:
    """Heads are sharded, or the slots, which rings leave alone."""
    rules = (("cache_length", "model"), ("batch", "data")) if slots else sharding.RULES
    _, leave = on(kind, rules, shape=(2, 2))
    try:
        check(LAYERS[name])
    finally:
        leave()


@pytest.mark.slow
def test_scan_decodes_under_vmap() -> None:
    """Two models of other parameters, caches and tokens at once."""
    (_, params, _), (scan, _, held), _, stacked = both(LAYERS["rotary, grouped"], None, False)
    models = [stacked(jax.tree.map(lambda x, a=a: a * x, params)) for a in (1.0, 0.5)]
    of_two = functools.partial(jax.tree.map, lambda *x: jnp.stack(x))
    params, caches = of_two(*models), [held, held]
    held = of_two(*caches)
    for T in (7, 3, 1):
        x = jnp.asarray(RNG.normal(size=(2, B, T, D)), jnp.float32)
        wanted, caches = zip(*map(functools.partial(step, scan), models, caches, x), strict=True)
        got, held = jax.vmap(functools.partial(step, scan))(params, held, x)
        np.testing.assert_allclose(got, jnp.stack(wanted), atol=2e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), held, of_two(*caches))
