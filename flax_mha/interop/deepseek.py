"""DeepSeek-V3: a decoder with latent attention and experts."""

import dataclasses
import math

from flax_mha.interop import table
from flax_mha.interop.checked_config import Config
from flax_mha.interop.gpt import HEAD_MAJOR
from flax_mha.interop.llama import (
    GATED_MLP,
    NORMS,
    decoder_rows,
    expert_rows,
    language_model,
)
from flax_mha.interop.shared_settings import activation, refuse, rotary
from flax_mha.models import Decoder
from flax_mha.models.blocks import DecoderBlock
from flax_mha.models.experts import Experts
from flax_mha.variants import MultiHeadLatentAttention

_PARTS = NORMS | {
    "self_attn.q_a_proj": "attention/query_down", "self_attn.q_a_layernorm": "attention/query_norm",
    "self_attn.kv_a_proj_with_mqa": "attention/kv_down",
    "self_attn.kv_a_layernorm": "attention/kv_norm", "self_attn.o_proj": "attention/out",
    "mlp.gate_proj": "mlp/gate", "mlp.up_proj": "mlp/up", "mlp.down_proj": "mlp/down",
    "mlp.shared_experts.gate_proj": "mlp/shared/gate",
    "mlp.shared_experts.up_proj": "mlp/shared/up",
    "mlp.shared_experts.down_proj": "mlp/shared/down",
}  # fmt: skip


def deepseek_v3(config: Config) -> table.Family:
    """Return the family of `DeepseekV3ForCausalLM`, without modules for further tokens."""
    D, N, count = (config[x] for x in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    refuse(
        config, attention_bias=False, num_key_value_heads=N, moe_layer_freq=1,
        scoring_func="sigmoid", topk_method="noaux_tc",
    )  # fmt: skip
    # YaRN's factor counts twice in the scores if the config says so.
    rotation, size = rotary(config), 1.0
    rope: Config = config.get("rope_parameters") or config.get("rope_scaling", {})
    if rotation.scaling is not None:
        size += 0.1 * rope.get("mscale_all_dim", 0) * math.log(max(1, rope.get("factor", 1)))
    H, R = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    # Norms of latents keep their default epsilon, whatever the config's rms_norm_eps is.
    layer = MultiHeadLatentAttention(
        N, head_dim=H, rope_dim=R, v_head_dim=config["v_head_dim"], use_bias=False,
        kv_rank=config["kv_lora_rank"], q_rank=config.get("q_lora_rank"),
        rotary=dataclasses.replace(rotation, interleaved=config.get("rope_interleave", True)),
        scale=(H + R) ** -0.5 * size**2,
    )  # fmt: skip
    act = activation(config, "hidden_act")
    experts = Experts(
        config["moe_intermediate_size"], config["n_routed_experts"], config["num_experts_per_tok"],
        activation=act, normalize=config.get("norm_topk_prob", True), routing="sigmoid",
        choice_bias=True, groups=config.get("n_group", 1), top_groups=config.get("topk_group", 1),
        factor=config.get("routed_scaling_factor", 1.0),
        shared=config["moe_intermediate_size"] * config["n_shared_experts"],
    )  # fmt: skip
    dense = config.get("first_k_dense_replace", 3)
    mlps = [None if i < dense else experts for i in range(count)]
    blocks = [
        DecoderBlock(
            layer, config["intermediate_size"] if mlp is None else None, norm="rmsnorm",
            norm_epsilon=config["rms_norm_eps"], gated=True, activation=act, mlp_bias=False,
            mlp=mlp,
        )
        for mlp in mlps
    ]  # fmt: skip
    theirs, ours = "model.layers.{}", "decoder/layers_{}"
    kernels = (f"{ours}/attention/key/kernel", f"{ours}/attention/value/kernel")
    rows = [
        *expert_rows(experts, "mlp", GATED_MLP),
        table.TensorRule(f"{theirs}.mlp.gate.e_score_correction_bias", f"{ours}/mlp/choice_bias"),
        table.TensorRule(f"{theirs}.self_attn.kv_b_proj.weight", kernels, HEAD_MAJOR, 1, True),
    ]
    query = "q_proj" if config.get("q_lora_rank") is None else "q_b_proj"
    rows = decoder_rows(count, _PARTS | {f"self_attn.{query}": "attention/query"}, rows)
    # Modules that predict further tokens follow the layers.
    further = range(count, count + config.get("num_nextn_predict_layers", 0))
    return language_model(
        config, D, Decoder(count, tuple(blocks)), rows, False,
        heads=tuple(f"layers.{i}.*" for i in further),
    )  # fmt: skip
