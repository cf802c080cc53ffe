"""Parameters saved by flax_mha 0.3 load unchanged and give the same outputs."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_mha import (
    Decoder,
    DecoderBlock,
    LanguageModel,
    MultiHeadAttention,
    QKNorm,
    masks,
    scores,
    variants,
)
from flax_mha.models import TokenEmbedding
from flax_mha.positions import Rotary

SAVED = np.load(Path(__file__).parent / "saved" / "parameters_0.3.npz")
CAUSAL = {"mask": masks.Causal()}
LAYERS = {
    "standard": MultiHeadAttention(2),
    "options": MultiHeadAttention(
        4, num_kv_heads=2, sinks=True, scale="learned", qk_norm=QKNorm(), gate="feature",
        rotary=Rotary(), scores=(scores.RelativeBias(),), **CAUSAL,
    ),
    "latent": variants.MultiHeadLatentAttention(
        2, head_dim=4, kv_rank=6, rope_dim=2, q_rank=5, use_bias=False, rotary=Rotary(), **CAUSAL
    ),
    "forgetting": variants.ForgettingAttention(2),
    "talking": variants.TalkingHeadsAttention(2, **CAUSAL),
    "chosen": variants.ChosenBlocksAttention(2, block=2, count=2),
    "differential": variants.DifferentialAttention(2, **CAUSAL),
    "model": LanguageModel(
        TokenEmbedding(9, 8),
        Decoder(2, DecoderBlock(MultiHeadAttention(2, rotary=Rotary()), 16), scan=True),
    ),
}  # fmt: skip


@pytest.mark.sampled(0.16)
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_of_0_3_load_with_same_outputs(name: str) -> None:
    """Names and shapes equal a new layer's."""
    flat = {k.partition(":")[2]: v for k, v in SAVED.items() if k.startswith(f"{name}:")}
    x, layer = SAVED["tokens" if name == "model" else "x"], LAYERS[name]
    asked = flatten_dict(jax.eval_shape(layer.init, jax.random.key(0), x)["params"], sep="/")
    assert {k: v.shape for k, v in asked.items()} == {k: v.shape for k, v in flat.items()}
    out = jax.jit(layer.apply)({"params": unflatten_dict(flat, sep="/")}, x)
    np.testing.assert_allclose(out, SAVED[f"{name}>out"], rtol=2e-5, atol=2e-5)
