"""GPT-NeoX and Pythia: decoders of text whose attention and MLP stand side by side."""

import numpy as np

from flax_mha.attention import MultiHeadAttention
from flax_mha.blocks import DecoderBlock
from flax_mha.embeddings import TokenEmbedding
from flax_mha.interop.config import activation, rotary
from flax_mha.interop.settings import Config, filled
from flax_mha.interop.table import SAME, Axes, Family, Row, each, linear, norm
from flax_mha.models import LanguageModel
from flax_mha.stacks import Decoder

# Of one head after another [N, H, D]; ours are [D, N, H].
_HEADS = Axes(lambda x, shape: x.transpose(2, 0, 1).reshape(shape), lambda x: x.transpose(1, 2, 0))


def gpt_neox(config: Config) -> Family:
    """Of `GPTNeoXForCausalLM`."""
    # As configs were before `rope_parameters`.
    old = {
        "rope_theta": config.get("rotary_emb_base", 1e4),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    D, N, layers = (config[f] for f in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    biased, tied = config.get("attention_bias", True), config.get("tie_word_embeddings", False)
    layer = MultiHeadAttention(
        N, use_bias=biased, rotary=rotary(filled(config, **old), partial=True)
    )
    block = DecoderBlock(
        layer, config["intermediate_size"], activation=activation(config, "hidden_act"),
        norm_epsilon=config["layer_norm_eps"], mlp_bias=True,
        parallel="own_norms" if config.get("use_parallel_residual", True) else False,
    )  # fmt: skip
    model = LanguageModel(TokenEmbedding(config["vocab_size"], D), Decoder(layers, block), tied)
    theirs, ours = "gpt_neox.layers.{}", "decoder/layers_{}"
    fused = [f"{ours}/attention/{name}" for name in ("query", "key", "value")]
    both = (("weight", "kernel", _HEADS), ("bias", "bias", SAME))
    rows = [
        Row(f"{theirs}.attention.query_key_value.{x}", tuple(f"{path}/{y}" for path in fused),
            axes, split=1, heads=N)
        for x, y, axes in both[: 1 + biased]
    ]  # fmt: skip
    rows += linear(f"{theirs}.attention.dense", f"{ours}/attention/out", biased, inputs=2)
    rows += linear(f"{theirs}.mlp.dense_h_to_4h", f"{ours}/mlp/up")
    rows += linear(f"{theirs}.mlp.dense_4h_to_h", f"{ours}/mlp/down")
    rows += norm(f"{theirs}.input_layernorm", f"{ours}/attention_norm")
    rows += norm(f"{theirs}.post_attention_layernorm", f"{ours}/mlp_norm")
    rows = [
        Row("gpt_neox.embed_in.weight", "embedding/table/embedding"),
        *each(layers, rows),
        *norm("gpt_neox.final_layer_norm", "decoder/norm"),
        *[Row("embed_out.weight", "head/table/embedding")] * (not tied),
    ]
    ignored = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")
    return Family(
        model, (np.zeros((1, 1), np.int32),), rows, ignored, prefix="gpt_neox.",
        copies={"embed_out.weight": "gpt_neox.embed_in.weight"},
    )  # fmt: skip
