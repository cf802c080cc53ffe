"""GPT-2 and GPT-NeoX: decoders of text."""

from flax_mha.interop.checked_config import Config, filled
from flax_mha.interop.llama import language_model
from flax_mha.interop.shared_settings import activation, rotary
from flax_mha.interop.table import (
    PROJECTIONS,
    SAME,
    Family,
    TensorRule,
    in_out,
    norm,
    parts,
    per_layer,
)
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Decoder, PositionEmbedding
from flax_mha.models.blocks import DecoderBlock

_GPT2 = {
    "attn.c_attn": ("attention/query", "attention/key", "attention/value"),
    "attn.c_proj": "attention/out", "mlp.c_fc": "mlp/up", "mlp.c_proj": "mlp/down",
    "ln_1": "attention_norm", "ln_2": "mlp_norm",
}  # fmt: skip
_NEOX = {
    "attention.dense": "attention/out", "mlp.dense_h_to_4h": "mlp/up",
    "mlp.dense_4h_to_h": "mlp/down", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}  # fmt: skip


def gpt2(config: Config) -> Family:
    """Return the family of `GPT2LMHeadModel`."""
    D, layers = config["n_embd"], config["n_layer"]
    block = DecoderBlock(
        MultiHeadAttention(config["n_head"]), config.get("n_inner") or 4 * D,
        activation=activation(config, "activation_function"),
        norm_epsilon=config["layer_norm_epsilon"],
    )  # fmt: skip
    rows = per_layer(
        layers, parts("transformer.h.{}", "decoder/layers_{}", _GPT2, kernel=in_out)
    ) + parts("transformer", "", {"wpe": "position_embedding", "ln_f": "decoder/norm"})
    return language_model(
        config, D, Decoder(layers, block), rows, True, "transformer.wte",
        ignored=("*.attn.bias", "*.attn.masked_bias"),  # Causal masks.
        position_embedding=PositionEmbedding(max_length=config["n_positions"]),
    )  # fmt: skip


# The checkpoint's kernel is [N, H, D], the module's [D, N, H].
HEAD_MAJOR = (lambda x, shape: x.transpose(2, 0, 1).reshape(shape), lambda x: x.transpose(1, 2, 0))


def gpt_neox(config: Config) -> Family:
    """Return the family of `GPTNeoXForCausalLM`."""
    D, N, layers = (config[f] for f in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    # The keys of configs from before `rope_parameters`.
    rotation = rotary(
        filled(config, partial_rotary_factor=config.get("rotary_pct", 0.25)),
        theta=config.get("rotary_emb_base", 1e4), partial=True,
    )  # fmt: skip
    block = DecoderBlock(
        MultiHeadAttention(N, use_bias=config.get("attention_bias", True), rotary=rotation),
        config["intermediate_size"], activation=activation(config, "hidden_act"),
        norm_epsilon=config["layer_norm_eps"], mlp_bias=True,
        parallel="own_norms" if config.get("use_parallel_residual", True) else False,
    )  # fmt: skip
    fused, ours = "gpt_neox.layers.{}.attention.query_key_value", "decoder/layers_{}"
    rows = parts("gpt_neox.layers.{}", ours, _NEOX)
    for suffix, leaf, axes in ((".weight", "kernel", HEAD_MAJOR), (".bias", "bias", SAME)):
        paths = tuple(f"{ours}/attention/{name}/{leaf}" for name in PROJECTIONS[:3])
        rows.append(TensorRule(f"{fused}{suffix}", paths, axes, split=1, merged=True))
    rows = per_layer(layers, rows) + norm("gpt_neox.final_layer_norm", "decoder/norm")
    return language_model(
        config, D, Decoder(layers, block), rows, False, "gpt_neox.embed_in", "embed_out",
        ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
    )  # fmt: skip
