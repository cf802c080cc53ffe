"""GPT-2: a decoder of text with learned positions."""

import numpy as np

from flax_mha.attention import MultiHeadAttention
from flax_mha.blocks import DecoderBlock
from flax_mha.embeddings import TokenEmbedding
from flax_mha.interop.config import activation, in_turn
from flax_mha.interop.settings import Config
from flax_mha.interop.table import PROJECTIONS, Family, Row, each, linear, norm, straight
from flax_mha.models import LanguageModel
from flax_mha.positions import PositionEmbedding
from flax_mha.stacks import Decoder


def gpt2(config: Config) -> Family:
    """Of `GPT2LMHeadModel`."""
    D, layers, heads = config["n_embd"], config["n_layer"], config["n_head"]
    tied = config.get("tie_word_embeddings", True)
    scale = None if config.get("scale_attn_weights", True) else 1.0
    scales = [scale] * layers
    if config.get("scale_attn_by_inverse_layer_idx", False):
        scales = [(scale or (D // heads) ** -0.5) / (i + 1) for i in range(layers)]

    def block(scale: float | None) -> DecoderBlock:
        return DecoderBlock(
            MultiHeadAttention(heads, scale=scale), config.get("n_inner") or 4 * D,
            activation=activation(config, "activation_function"),
            norm_epsilon=config["layer_norm_epsilon"],
        )  # fmt: skip

    model = LanguageModel(
        TokenEmbedding(config["vocab_size"], D),
        Decoder(layers, tuple(map(block, in_turn(scales)))),
        tied,
        position_embedding=PositionEmbedding(max_length=config["n_positions"]),
    )
    theirs, ours = "transformer.h.{}", "decoder/layers_{}"
    fused = tuple(f"{ours}/attention/{name}" for name in PROJECTIONS[:3])
    rows = [
        *linear(f"{theirs}.attn.c_attn", fused, axes=straight(), split=1),
        *linear(f"{theirs}.attn.c_proj", f"{ours}/attention/out", axes=straight(2)),
        *norm(f"{theirs}.ln_1", f"{ours}/attention_norm"),
        *linear(f"{theirs}.mlp.c_fc", f"{ours}/mlp/up", axes=straight()),
        *linear(f"{theirs}.mlp.c_proj", f"{ours}/mlp/down", axes=straight()),
        *norm(f"{theirs}.ln_2", f"{ours}/mlp_norm"),
    ]
    rows = [
        Row("transformer.wte.weight", "embedding/table/embedding"),
        Row("transformer.wpe.weight", "position_embedding/embedding"),
        *each(layers, rows),
        *norm("transformer.ln_f", "decoder/norm"),
        *[Row("lm_head.weight", "head/table/embedding")] * (not tied),
    ]
    # Causal masks.
    ignored = ("*.attn.bias", "*.attn.masked_bias")
    return Family(
        model, (np.zeros((1, 1), np.int32),), rows, ignored, prefix="transformer.",
        copies={"lm_head.weight": "transformer.wte.weight"},
    )  # fmt: skip
