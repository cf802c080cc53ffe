"""GPT-2 and GPT-NeoX: decoders of text."""

from flax_mha.interop import table
from flax_mha.interop.checked_config import Config, filled
from flax_mha.interop.llama import language_model
from flax_mha.interop.shared_settings import activation, repeating_part, rotary
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Decoder, PositionEmbedding
from flax_mha.models.blocks import DecoderBlock

_LAYER = "decoder/layers_{}"


def gpt2(config: Config) -> table.Family:
    """Return the family of `GPT2LMHeadModel`."""
    D, layers, heads = config["n_embd"], config["n_layer"], config["n_head"]
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

    layer = "transformer.h.{}"
    fused = tuple(f"{_LAYER}/attention/{name}" for name in table.PROJECTIONS[:3])
    rows = table.linear(f"{layer}.attn.c_attn", fused, axes=table.in_out(), split=1)
    rows += table.linear(f"{layer}.attn.c_proj", f"{_LAYER}/attention/out", axes=table.in_out(2))
    rows += table.linear(f"{layer}.mlp.c_fc", f"{_LAYER}/mlp/up", axes=table.in_out())
    rows += table.linear(f"{layer}.mlp.c_proj", f"{_LAYER}/mlp/down", axes=table.in_out())
    rows += table.parts(layer, _LAYER, {"ln_1": "attention_norm", "ln_2": "mlp_norm"})
    rows = [
        table.TensorRule("transformer.wpe.weight", "position_embedding/embedding"),
        *table.per_layer(layers, rows),
        *table.norm("transformer.ln_f", "decoder/norm"),
    ]
    decoder = Decoder(layers, tuple(map(block, repeating_part(scales))))
    return language_model(
        config, D, decoder, rows, True, "transformer.wte",
        ignored=("*.attn.bias", "*.attn.masked_bias"),  # Causal masks.
        position_embedding=PositionEmbedding(max_length=config["n_positions"]),
    )  # fmt: skip


# The checkpoint's kernel is [N, H, D], the module's [D, N, H].
HEAD_MAJOR = table.Layout(
    lambda x, shape: x.transpose(2, 0, 1).reshape(shape), lambda x: x.transpose(1, 2, 0)
)


def gpt_neox(config: Config) -> table.Family:
    """Return the family of `GPTNeoXForCausalLM`."""
    # The keys of configs from before `rope_parameters`.
    old = {
        "rope_theta": config.get("rotary_emb_base", 1e4),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    D, N, layers = (config[f] for f in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    biased = config.get("attention_bias", True)
    rotation = rotary(filled(config, **old), partial=True)
    block = DecoderBlock(
        MultiHeadAttention(N, use_bias=biased, rotary=rotation),
        config["intermediate_size"], activation=activation(config, "hidden_act"),
        norm_epsilon=config["layer_norm_eps"], mlp_bias=True,
        parallel="own_norms" if config.get("use_parallel_residual", True) else False,
    )  # fmt: skip
    layer = "gpt_neox.layers.{}"
    fused = f"{layer}.attention.query_key_value"
    kernels, biases = (
        tuple(f"{_LAYER}/attention/{name}/{leaf}" for name in table.PROJECTIONS[:3])
        for leaf in ("kernel", "bias")
    )
    rows = [
        table.TensorRule(f"{fused}.weight", kernels, HEAD_MAJOR, split=1, heads=N),
        *table.when(biased, table.TensorRule(f"{fused}.bias", biases, split=1, heads=N)),
        *table.linear(f"{layer}.attention.dense", f"{_LAYER}/attention/out", biased, inputs=2),
        *table.parts(layer, _LAYER, {
            "mlp.dense_h_to_4h": "mlp/up", "mlp.dense_4h_to_h": "mlp/down",
            "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm",
        }),
    ]  # fmt: skip
    rows = [
        *table.per_layer(layers, rows),
        *table.norm("gpt_neox.final_layer_norm", "decoder/norm"),
    ]
    return language_model(
        config, D, Decoder(layers, block), rows, False, "gpt_neox.embed_in", "embed_out",
        ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
    )  # fmt: skip
