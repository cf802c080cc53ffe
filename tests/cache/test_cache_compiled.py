"""The compiled decoding steps of TPUs and GPUs that are not here."""

import importlib.util
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from experiments.measure import programs
from experiments.measure.compiled import MIB, TPUS, chip_of, measure
from experiments.plan import gpus
from flax_mha import (
    CacheConfig,
    DecoderBlock,
    MultiHeadAttention,
    MultiHeadDotProductAttention,
    QKNorm,
    variants,
)
from flax_mha.masks import Window
from flax_mha.models import Decoder
from flax_mha.positions import Rotary
from tests.kernels.cases import pairs


@pytest.mark.sampled(0)
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu")
@pytest.mark.parametrize(
    ("name", "H", "K", "dtype", "T", "kind"),
    [
        *pairs(
            name=["v5e", "v5p", "v6e", "tpu7x"], H=[64, 80, 96, 128, 192], K=[4, 16],
            dtype=["bfloat16", "int8"], T=[1, 5], kind=["plain", "ring", "scan"],
        ),
        ("tpu7x", 256, 4, "int8", 1, "plain"),
    ],
)  # fmt: skip
@jax.numpy_dtype_promotion("standard")
def test_heads_of_any_width_move_a_cache_once(
    optimized: None, name: str, H: int, K: int, dtype: str, T: int, kind: str
) -> None:
    """TPUs keep the slots of narrow heads in their lanes. They hold no copy of a cache either."""
    device = topologies.get_topology_desc(f"{name}:{TPUS[name]}", "tpu").devices[0]
    chip, is_ring = programs.Chip(device, False), kind == "ring"
    model: nn.Module = MultiHeadAttention(
        16, num_kv_heads=K, head_dim=H, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, decode=True,
        cache=CacheConfig(dtype, slots=8192 if is_ring else None),
        mask=Window(8000, 0) if is_ring else None,
    )  # fmt: skip
    if kind == "scan":
        model = Decoder(4, DecoderBlock(model, 64), scan=True)
    whole, new = (chip.array(8, n, 1024) for n in (8192, T))
    function, arguments = programs.step(chip, model, whole, new)
    row = measure(chip, programs.Entry("", "ours", "step", function, arguments))
    cache, least = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(y)) / MIB
                    for y in (arguments[0], arguments))  # fmt: skip
    # The float32 scores, in rows padded to 8, are written and read several times, at any width.
    scores = 4 * 8 * K * -(-(16 // K) * T // 8) * 8 * 8192 / MIB
    layers = 4 if kind == "scan" else 1
    assert row["MiB"] <= (1.4 if name == "v5p" else 1.15) * least + 5 * layers * scores
    assert row["held"] <= 0.1 * cache + 1.5 * scores


HALF: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "decode": True}
SCANNED = MultiHeadAttention(16, **HALF)
# Layers, and how often they read their cache. Chosen blocks need all keys for their means, latents
# are both keys and values, and a scan on GPUs reads and writes its part.
READS: dict[str, tuple[nn.Module, float]] = {
    "layer of all options": (
        MultiHeadAttention(
            16, num_kv_heads=4, qk_norm=QKNorm("layernorm"), sinks=True, scale="learned",
            gate="head", rotary=Rotary(), **HALF,
        ), 1,
    ),
    "int8": (SCANNED.copy(cache=CacheConfig("int8")), 1),
    "scanned": (Decoder(4, DecoderBlock(SCANNED, 64), scan=True), 1.2),
    "scanned, grouped": (
        Decoder(4, DecoderBlock(SCANNED.copy(num_kv_heads=4), 64), scan=True), 2.1,
    ),
    "scanned, alternating": (
        Decoder(
            4,
            [DecoderBlock(SCANNED, 64), DecoderBlock(SCANNED.copy(rotary=Rotary()), 64)],
            scan=True,
        ), 1.2,
    ),
    "Flax's layer": (MultiHeadDotProductAttention(16, **HALF), 1),
    "chosen blocks": (variants.ChosenBlocksAttention(16, block=64, count=4, **HALF), 1.5),
    "differential": (variants.DifferentialAttention(16, **HALF), 1),
    "forgetting": (variants.ForgettingAttention(16, **HALF), 1),
    "latent": (
        variants.MultiHeadLatentAttention(
            16, head_dim=128, kv_rank=512, rotary=Rotary(), use_bias=False, **HALF
        ), 2.1,
    ),
    "talking heads": (variants.TalkingHeadsAttention(16, **HALF), 1),
}  # fmt: skip


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", ["v5e", pytest.param("h200", marks=pytest.mark.gpu_compile)])
@pytest.mark.parametrize("layer", READS)
@jax.numpy_dtype_promotion("standard")
def test_layers_copy_no_cache(optimized: None, layer: str, name: str) -> None:
    if gpus.lacking() if name == "h200" else not importlib.util.find_spec("libtpu"):
        pytest.skip(f"needs the compiler of {name}")
    chip, (model, times) = chip_of(name), READS[layer]
    function, arguments = programs.step(chip, model, *(chip.array(8, n, 2048) for n in (4096, 1)))
    row = measure(chip, programs.Entry("", "ours", "step", function, arguments))
    cache, rest = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(y)) / MIB
                   for y in (arguments[0], arguments[1:]))  # fmt: skip
    assert row["MiB"] <= 1.15 * (times * cache + rest)
    assert row["held"] <= 0.15 * cache
