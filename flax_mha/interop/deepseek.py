"""DeepSeek-V3: a decoder with latent attention and experts."""

import dataclasses
import math

from flax_mha.interop import table
from flax_mha.interop.checked_config import Config
from flax_mha.interop.gpt import HEAD_MAJOR
from flax_mha.interop.llama import GATED_MLP, NORMS, expert_rows, language_model
from flax_mha.interop.shared_settings import activation, refuse, rotary
from flax_mha.models import Decoder
from flax_mha.models.blocks import DecoderBlock
from flax_mha.models.experts import Experts
from flax_mha.variants import MultiHeadLatentAttention

_THEIRS, _OURS = "model.layers.{}", "decoder/layers_{}"


def deepseek_v3(config: Config) -> table.Family:
    """Return the family of `DeepseekV3ForCausalLM`, without modules for further tokens."""
    D, N, count = (config[x] for x in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    refuse(
        config, attention_bias=False, num_key_value_heads=N, moe_layer_freq=1,
        scoring_func="sigmoid", topk_method="noaux_tc",
    )  # fmt: skip
    layer, act = _attention(config, N), activation(config, "hidden_act")
    experts = Experts(
        config["moe_intermediate_size"], config["n_routed_experts"], config["num_experts_per_tok"],
        activation=act, normalize=config.get("norm_topk_prob", True), routing="sigmoid",
        choice_bias=True, groups=config.get("n_group", 1), top_groups=config.get("topk_group", 1),
        factor=config.get("routed_scaling_factor", 1.0),
        shared=config["moe_intermediate_size"] * config["n_shared_experts"],
    )  # fmt: skip
    dense = config.get("first_k_dense_replace", 3)
    is_sparse = [i >= dense for i in range(count)]
    blocks = [
        DecoderBlock(
            layer, None if sparse else config["intermediate_size"], norm="rmsnorm",
            norm_epsilon=config["rms_norm_eps"], gated=True, activation=act, mlp_bias=False,
            mlp=experts if sparse else None,
        )
        for sparse in is_sparse
    ]  # fmt: skip
    sparse, plain = range(min(dense, count), count), range(min(dense, count))
    shared = table.parts(f"{_THEIRS}.mlp.shared_experts", f"{_OURS}/mlp/shared", GATED_MLP, False)
    bias = f"{_THEIRS}.mlp.gate.e_score_correction_bias"
    rows = [
        *table.per_layer(count, [
            *_attention_rows(config, N), *table.parts(_THEIRS, _OURS, NORMS, False),
        ]),
        *table.per_layer(plain, table.parts(f"{_THEIRS}.mlp", f"{_OURS}/mlp", GATED_MLP, False)),
        *expert_rows(experts, "mlp", GATED_MLP, is_sparse),
        *table.per_layer(sparse, [*shared, table.TensorRule(bias, f"{_OURS}/mlp/choice_bias")]),
        *table.norm("model.norm", "decoder/norm", False),
    ]  # fmt: skip
    # Modules that predict further tokens follow the layers.
    further = range(count, count + config.get("num_nextn_predict_layers", 0))
    return language_model(
        config, D, Decoder(count, tuple(blocks)), rows, False,
        heads=tuple(f"layers.{i}.*" for i in further),
    )  # fmt: skip


def _attention(config: Config, N: int) -> MultiHeadLatentAttention:
    """Return the attention layer, whose scores have the factor of YaRN twice if the config says."""
    rotation = rotary(config)
    H, R = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    rope: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor, all_dims = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default" and all_dims
    size = 0.1 * all_dims * math.log(factor) + 1 if is_scaled and factor > 1 else 1.0
    # Norms of latents keep their default epsilon, whatever the config's rms_norm_eps is.
    return MultiHeadLatentAttention(
        N, head_dim=H, rope_dim=R, v_head_dim=config["v_head_dim"], use_bias=False,
        kv_rank=config["kv_lora_rank"], q_rank=config.get("q_lora_rank"),
        rotary=dataclasses.replace(rotation, interleaved=config.get("rope_interleave", True)),
        scale=(H + R) ** -0.5 * size**2,
    )  # fmt: skip


def _attention_rows(config: Config, N: int) -> list[table.TensorRule]:
    theirs, ours = f"{_THEIRS}.self_attn", f"{_OURS}/attention"
    kernels = (f"{ours}/key/kernel", f"{ours}/value/kernel")
    query = {"q_proj": "query"}
    if config.get("q_lora_rank") is not None:
        query = {"q_a_proj": "query_down", "q_a_layernorm": "query_norm", "q_b_proj": "query"}
    return [
        *table.parts(theirs, ours, query | {
            "kv_a_proj_with_mqa": "kv_down", "kv_a_layernorm": "kv_norm"
        }, bias=False),
        table.TensorRule(f"{theirs}.kv_b_proj.weight", kernels, HEAD_MAJOR, split=1, heads=N),
        *table.linear(f"{theirs}.o_proj", f"{ours}/out", bias=False, inputs=2),
    ]  # fmt: skip
