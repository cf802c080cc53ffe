"""GPT-2: a decoder of text with learned positions."""

import numpy as np

from flax_mha.attention import MultiHeadAttention
from flax_mha.blocks import DecoderBlock
from flax_mha.embeddings import TokenEmbedding
from flax_mha.interop.config import Config, activation, refuse
from flax_mha.interop.table import FLAT, Family, Row, each, norm, straight
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
    fused = [f"{ours}/attention/{name}" for name in ("query", "key", "value")]
    rows = [
        Row(f"{theirs}.attn.c_attn.weight", tuple(f"{x}/kernel" for x in fused), straight(), 1),
        Row(f"{theirs}.attn.c_attn.bias", tuple(f"{x}/bias" for x in fused), FLAT),
        *norm(f"{theirs}.ln_1", f"{ours}/attention_norm"),
        *norm(f"{theirs}.ln_2", f"{ours}/mlp_norm"),
    ]
    products = {"attn.c_proj": "attention/out", "mlp.c_fc": "mlp/up", "mlp.c_proj": "mlp/down"}
    for name, mine in products.items():
        axes = straight(2 if mine.endswith("out") else 1)
        rows.append(Row(f"{theirs}.{name}.weight", f"{ours}/{mine}/kernel", axes))
        rows.append(Row(f"{theirs}.{name}.bias", f"{ours}/{mine}/bias"))
    rows = [
        Row("transformer.wte.weight", "embedding/table/embedding"),
        Row("transformer.wpe.weight", "position_embedding/embedding"),
        *each(layers, rows),
        *norm("transformer.ln_f", "decoder/norm"),
    ]
    # Copies of the table, and causal masks.
    ignored = ("lm_head.weight", "*.attn.bias", "*.attn.masked_bias")
    return Family(model, (np.zeros((1, 1), np.int32),), rows, ignored, prefix="transformer.")
