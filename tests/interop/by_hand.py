"""Models with experts, their parameters copied by hand: of each as much as has no experts.

gpt-oss has one expert here, which is a gated MLP: (up + 1)·gate·σ(1.702·gate), of which the 1 goes
into a bias. DeepSeek-V3 has its first, dense layers, and Qwen3-Next those with softmax attention.
"""

from typing import Any

import numpy as np
import transformers as hf

from flax_mha import (
    Decoder,
    DecoderBlock,
    LanguageModel,
    MultiHeadAttention,
    QKNorm,
    masks,
    positions,
)
from flax_mha.models import TokenEmbedding
from flax_mha.positions import Rotary
from flax_mha.variants import MultiHeadLatentAttention
from tests.interop.families import DECODER, TEXT, Case, text

N, K, H = 4, 2, 16
Tensors = dict[str, np.ndarray]


def projections(w: Tensors, names: dict[str, tuple[str, int]], bias: bool) -> dict[str, Any]:
    """Kernels [D, n, ·] (out: [n, ·, D]) and biases, of so many heads."""
    found = {}
    for name, (theirs, count) in names.items():
        kernel = w[f"{theirs}.weight"].T
        shape = (count, -1, kernel.shape[1]) if name == "out" else (kernel.shape[0], count, -1)
        found[name] = {"kernel": kernel.reshape(shape)}
        if bias:
            x = w[f"{theirs}.bias"]
            found[name]["bias"] = x if name == "out" else x.reshape(count, -1)
    return found


QKVO = {"query": ("q_proj", N), "key": ("k_proj", K), "value": ("v_proj", K), "out": ("o_proj", N)}


def gpt_oss(config: Any, w: Tensors) -> tuple[Any, Any]:
    yarn = positions.Yarn(8.0, 8, truncate=False)
    layer = MultiHeadAttention(
        N, num_kv_heads=K, head_dim=H, sinks=True, rotary=Rotary(100.0, scaling=yarn),
        mask=masks.Causal() & masks.Window(2, 0),
    )  # fmt: skip
    return layer, projections(w, QKVO, bias=True) | {"sinks": w["sinks"]}


def qwen3_next(config: Any, w: Tensors) -> tuple[Any, Any]:
    layer = MultiHeadAttention(
        N, num_kv_heads=K, head_dim=H, use_bias=False, gate="feature", qk_norm=QKNorm("rmsnorm"),
        rotary=Rotary(1e4, fraction=0.25), mask=masks.Causal(),
    )  # fmt: skip
    # Each head has its queries, then its gates.
    q, gate = np.split(w["q_proj.weight"].reshape(N, 2, H, -1), 2, 1)
    w = w | {"q_proj.weight": q.reshape(N * H, -1), "gate.weight": gate.reshape(N * H, -1)}
    params = projections(w, QKVO | {"output_gate": ("gate", N)}, bias=False)
    for name, theirs in (("query_ln", "q_norm"), ("key_ln", "k_norm")):
        params[name] = {"scale": 1 + w[f"{theirs}.weight"]}
    return layer, params


def deepseek_v3(config: Any, w: Tensors) -> tuple[Any, Any]:
    rank, nope, rope, Hv = 12, 8, 4, 6
    layer = MultiHeadLatentAttention(
        N, head_dim=nope, rope_dim=rope, v_head_dim=Hv, kv_rank=rank, q_rank=16, use_bias=False,
        rotary=Rotary(1e4, interleaved=True), mask=masks.Causal(),
    )  # fmt: skip
    both = w["kv_b_proj.weight"].T.reshape(rank, N, nope + Hv)
    params = {
        "query_down": {"kernel": w["q_a_proj.weight"].T},
        "query_norm": {"scale": w["q_a_layernorm.weight"]},
        "kv_down": {"kernel": w["kv_a_proj_with_mqa.weight"].T},
        "kv_norm": {"scale": w["kv_a_layernorm.weight"]},
        "key": {"kernel": both[..., :nope]}, "value": {"kernel": both[..., nope:]},
    }  # fmt: skip
    names = {"query": ("q_b_proj", N), "out": ("o_proj", N)}
    return layer, params | projections(w, names, bias=False)


def part(w: Tensors, prefix: str) -> Tensors:
    """Those below a name, without it."""
    return {key.removeprefix(prefix): x for key, x in w.items() if key.startswith(prefix)}


def mlp_of(w: Tensors) -> dict[str, Any]:
    """A gated MLP's parameters."""
    if "experts.gate_up_proj" not in w:
        return {x: {"kernel": w[f"{x}_proj.weight"].T} for x in ("gate", "up", "down")}
    both, bias = w["experts.gate_up_proj"][0], w["experts.gate_up_proj_bias"][0]
    return {
        "gate": {"kernel": both[:, ::2], "bias": bias[::2]},
        "up": {"kernel": both[:, 1::2], "bias": 1 + bias[1::2]},
        "down": {"kernel": w["experts.down_proj"][0], "bias": w["experts.down_proj_bias"][0]},
    }


def whole(layer_of: Any, activation: str, config: Any, w: Tensors, offset: float) -> Any:
    """The language model of such layers, and its parameters."""
    blocks, params = [], {}
    for i in range(config.num_hidden_layers):
        below = part(w, f"model.layers.{i}.")
        layer, attention = layer_of(config, part(below, "self_attn."))
        if getattr(config, "layer_types", ["sliding"] * (i + 1))[i] == "full_attention":
            layer = layer.clone(mask=None)
        mlp = mlp_of(part(below, "mlp."))
        block = DecoderBlock(
            layer, config.intermediate_size, norm="rmsnorm", norm_epsilon=config.rms_norm_eps,
            activation=activation, gated=True, mlp_bias="bias" in mlp["up"],
        )  # fmt: skip
        blocks.append(block)
        params[f"layers_{i}"] = {
            "attention": attention, "mlp": mlp,
            "attention_norm": {"scale": offset + below["input_layernorm.weight"]},
            "mlp_norm": {"scale": offset + below["post_attention_layernorm.weight"]},
        }  # fmt: skip
    params["norm"] = {"scale": offset + w["model.norm.weight"]}
    D = config.hidden_size
    module = LanguageModel(
        TokenEmbedding(config.vocab_size, D), Decoder(len(blocks), tuple(blocks)), tied=False
    )
    table = {"table": {"embedding": w["model.embed_tokens.weight"]}}
    head = {"table": {"embedding": w["lm_head.weight"]}}
    return module, {"params": {"embedding": table, "decoder": params, "head": head}}


YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "truncate": False,
    "original_max_position_embeddings": 8, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LAYERS: dict[str, tuple[Any, Any, Any]] = {
    "gpt-oss": (gpt_oss, hf.GptOssForCausalLM, hf.GptOssConfig(
        **DECODER, num_local_experts=1, num_experts_per_tok=1, sliding_window=3,
        rope_parameters=YARN, swiglu_limit=1e4,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )),
    "qwen3-next": (qwen3_next, hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig(
        **DECODER, layer_types=["full_attention"] * 3, num_experts=0, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )),
    "deepseek-v3": (deepseek_v3, hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config(
        **TEXT, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=6, first_k_dense_replace=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )),
}  # fmt: skip


def by_hand(name: str, activation: str = "silu", offset: float = 0.0) -> Case:
    """A case of `families`, whose parameters are copied here."""
    layer_of, model, config = LAYERS[name]
    return text(model, config)._replace(
        by_hand=lambda w: whole(layer_of, activation, config, w, offset)
    )


CASES = {
    "gpt-oss": by_hand("gpt-oss", "quick_gelu"),
    "qwen3-next": by_hand("qwen3-next", offset=1.0),
    "deepseek-v3": by_hand("deepseek-v3"),
}
