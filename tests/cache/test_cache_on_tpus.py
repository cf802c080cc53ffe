"""The compiled decoding step of TPUs, which keep the slots of narrow heads in their lanes."""

import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from experiments.measure import programs
from experiments.measure.compiled import MIB, TPUS, measure
from flax_mha import CacheConfig, DecoderBlock, MultiHeadAttention
from flax_mha.masks import Window
from flax_mha.models import Decoder
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
    """It holds no copy of it either."""
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
