"""Parameters that flax_mha 0.3 has saved load as they are, and give the outputs that it gave."""

from pathlib import Path

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

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


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_of_0_3(name: str) -> None:
    """They have no name too many or too few: each is a parameter that the layer asks for."""
    flat = {k.partition(":")[2]: v for k, v in SAVED.items() if k.startswith(f"{name}:")}
    x = SAVED["tokens" if name == "model" else "x"]
    layer = LAYERS[name]
    out, state = layer.apply({"params": unflatten_dict(flat, sep="/")}, x, mutable=["params"])
    assert not any(k not in flat for k in _flat(state.get("params", {})))
    np.testing.assert_allclose(out, SAVED[f"{name}>out"], rtol=2e-5, atol=2e-5)


def _flat(tree: dict, before: str = "") -> list[str]:
    return [
        path
        for key, value in tree.items()
        for path in (_flat(value, f"{before}{key}/") if isinstance(value, dict) else [before + key])
    ]
