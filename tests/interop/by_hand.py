"""Models that no table loads, with parameters copied by hand.

DeepSeek-V3 has only its first, dense layers here, and Qwen3-Next only softmax attention.
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
)
from flax_mha.models import TokenEmbedding
from flax_mha.positions import Rotary
from flax_mha.variants import MultiHeadLatentAttention
from tests.interop.families import DECODER, TEXT, Case, text

N, K, H = 4, 2, 16
Tensors = dict[str, np.ndarray]


def projections(w: Tensors, names: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """Return kernels [D, n, ·] (out: [n, ·, D]) with these numbers of heads."""
    found = {}
    for name, (theirs, count) in names.items():
        kernel = w[f"{theirs}.weight"].T
        shape = (count, -1, kernel.shape[1]) if name == "out" else (kernel.shape[0], count, -1)
        found[name] = {"kernel": kernel.reshape(shape)}
    return found


QKVO = {"query": ("q_proj", N), "key": ("k_proj", K), "value": ("v_proj", K), "out": ("o_proj", N)}


def qwen3_next(config: Any, w: Tensors) -> tuple[Any, Any]:
    layer = MultiHeadAttention(
        N, num_kv_heads=K, head_dim=H, use_bias=False, gate="feature", qk_norm=QKNorm("rmsnorm"),
        rotary=Rotary(1e4, fraction=0.25), mask=masks.Causal(),
    )  # fmt: skip
    # Each head has its queries, then its gates.
    q, gate = np.split(w["q_proj.weight"].reshape(N, 2, H, -1), 2, 1)
    w = w | {"q_proj.weight": q.reshape(N * H, -1), "gate.weight": gate.reshape(N * H, -1)}
    params = projections(w, QKVO | {"output_gate": ("gate", N)})
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
    return layer, params | projections(w, names)


def part(w: Tensors, prefix: str) -> Tensors:
    """Return the tensors below a prefix, without the prefix."""
    return {key.removeprefix(prefix): x for key, x in w.items() if key.startswith(prefix)}


def mlp_of(w: Tensors) -> dict[str, Any]:
    """Return a gated MLP's parameters."""
    return {x: {"kernel": w[f"{x}_proj.weight"].T} for x in ("gate", "up", "down")}


def whole(layer_of: Any, config: Any, w: Tensors, offset: float) -> Any:
    """Build the language model of these layers, and its parameters."""
    blocks, params = [], {}
    for i in range(config.num_hidden_layers):
        below = part(w, f"model.layers.{i}.")
        layer, attention = layer_of(config, part(below, "self_attn."))
        mlp = mlp_of(part(below, "mlp."))
        block = DecoderBlock(
            layer, config.intermediate_size, norm="rmsnorm", norm_epsilon=config.rms_norm_eps,
            activation="silu", gated=True, mlp_bias=False,
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


LAYERS: dict[str, tuple[Any, Any, Any]] = {
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


def by_hand(name: str, offset: float = 0.0) -> Case:
    """Return a case of `families` with parameters copied here."""
    layer_of, model, config = LAYERS[name]
    return text(model, config)._replace(by_hand=lambda w: whole(layer_of, config, w, offset))


CASES = {
    "qwen3-next": by_hand("qwen3-next", offset=1.0),
    "deepseek-v3": by_hand("deepseek-v3"),
}
