"""GPT-2: a decoder of text with learned positions."""

import numpy as np

from flax_mha.attention import MultiHeadAttention
from flax_mha.blocks import DecoderBlock
from flax_mha.embeddings import TokenEmbedding
from flax_mha.interop.config import activation, refuse
from flax_mha.interop.settings import Config
from flax_mha.interop.table import PROJECTIONS, Family, Row, each, linear, norm, straight
from flax_mha.models import LanguageModel
from flax_mha.positions import PositionEmbedding
from flax_mha.stacks import Decoder


def gpt2(config: Config) -> Family:
    """Of `GPT2LMHeadModel`."""
    refuse(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    D, layers = config["n_embd"], config["n_layer"]
    block = DecoderBlock(
        MultiHeadAttention(config["n_head"]), config.get("n_inner") or 4 * D,
        activation=activation(config, "activation_function"),
        norm_epsilon=config["layer_norm_epsilon"],
    )  # fmt: skip
    model = LanguageModel(
        TokenEmbedding(config["vocab_size"], D),
        Decoder(layers, block),
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
    ]
    # Copies of the table, and causal masks.
    ignored = ("lm_head.weight", "*.attn.bias", "*.attn.masked_bias")
    return Family(model, (np.zeros((1, 1), np.int32),), rows, ignored, prefix="transformer.")
