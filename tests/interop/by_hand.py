"""Models that no table loads, with parameters copied by hand.

Qwen3-Next has only softmax attention here.
"""

from typing import Any

import numpy as np
import transformers as hf

from flax_mha import Decoder, DecoderBlock, LanguageModel, MultiHeadAttention, QKNorm, masks
from flax_mha.models import TokenEmbedding
from flax_mha.positions import Rotary
from tests.interop.families import DECODER, Case, text

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
}  # fmt: skip


def by_hand(name: str, offset: float = 0.0) -> Case:
    """Return a case of `families` with parameters copied here."""
    layer_of, model, config = LAYERS[name]
    return text(model, config)._replace(by_hand=lambda w: whole(layer_of, config, w, offset))


CASES = {"qwen3-next": by_hand("qwen3-next", offset=1.0)}
