"""Llama, Mistral, Qwen and Gemma: decoders of text with rotary positions and gated MLPs."""

from typing import Any

import numpy as np

from flax_mha import masks
from flax_mha.attention import MultiHeadAttention
from flax_mha.blocks import DecoderBlock
from flax_mha.embeddings import TokenEmbedding
from flax_mha.experts import Experts
from flax_mha.interop.config import activation, in_turn, refuse, rotary
from flax_mha.interop.settings import Config
from flax_mha.interop.table import PROJECTIONS, Family, Row, attention, each, linear, norm
from flax_mha.models import LanguageModel
from flax_mha.qk_norm import QKNorm
from flax_mha.scores import SoftCap
from flax_mha.stacks import Decoder

HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")


def llama(
    config: Config, mlp: Experts | None = None, own: list[Row] | None = None, sinks: bool = False
) -> Family:
    """Of `LlamaForCausalLM`, and those of Mistral, Qwen2, Qwen3, Gemma 2 and 3.

    Args:
      config: of the model.
      mlp: in place of a gated MLP.
      own: rows of each layer in place of those of the MLP.
      sinks: whether its attention has them.
    """
    D, layers = config["hidden_size"], config["num_hidden_layers"]
    model = LanguageModel(
        TokenEmbedding(config["vocab_size"], D, scale=D**0.5 if _is_gemma(config) else 1.0),
        Decoder(layers, tuple(_block(config, x, mlp, sinks) for x in in_turn(_kinds(config)))),
        tied=_tied(config),
        logits_cap=config.get("final_logit_softcapping"),
    )
    ignored = ("lm_head.weight", "*.rotary_emb.inv_freq")
    example = (np.zeros((1, 1), np.int32),)
    return Family(model, example, _rows(config, own), ignored, prefix="model.")


def _block(config: Config, kind: str, mlp: Experts | None, sinks: bool) -> DecoderBlock:
    epsilon, scalar = config["rms_norm_eps"], config.get("query_pre_attn_scalar")
    cap = config.get("attn_logit_softcapping")
    layer = MultiHeadAttention(
        config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        use_bias=_biased(config),
        rotary=rotary(config, kind),
        mask=masks.Window(config["sliding_window"] - 1, 0) if kind.startswith("slid") else None,
        scale=None if scalar is None else scalar**-0.5,
        scores=() if cap is None else (SoftCap(cap),),
        qk_norm=QKNorm("rmsnorm", epsilon=epsilon) if _has_norm(config) else None,
        sinks=sinks,
    )
    return DecoderBlock(
        layer, config["intermediate_size"] if mlp is None else None, norm="rmsnorm",
        norm_epsilon=epsilon, gated=True, branch_norm=_is_gemma(config), mlp=mlp,
        activation=activation(config, "hidden_activation", "hidden_act"),
        mlp_bias=config.get("mlp_bias", False),
    )  # fmt: skip


def _rows(config: Config, own: list[Row] | None) -> list[Row]:
    theirs, ours = "model.layers.{}", "decoder/layers_{}"
    biased, gemma = _biased(config), _is_gemma(config)
    scale: dict[str, Any] = {"bias": False, "offset": 1.0 if gemma else 0.0}
    biases = [name in biased for name in PROJECTIONS]
    rows = attention(f"{theirs}.self_attn", f"{ours}/attention", HEADS, biases)
    rows += own or []
    for name in ("gate", "up", "down") if own is None else ():
        at = (f"{theirs}.mlp.{name}_proj", f"{ours}/mlp/{name}")
        rows += linear(*at, config.get("mlp_bias", False))
    names = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    if gemma:
        names |= {
            "post_attention_layernorm": "attention_branch_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_branch_norm",
        }
    if _has_norm(config):
        names |= {
            "self_attn.q_norm": "attention/query_ln", "self_attn.k_norm": "attention/key_ln"
        }  # fmt: skip
    for name, mine in names.items():
        rows += norm(f"{theirs}.{name}", f"{ours}/{mine}", **scale)
    rows = each(config["num_hidden_layers"], rows)
    rows += norm("model.norm", "decoder/norm", **scale)
    rows.append(Row("model.embed_tokens.weight", "embedding/table/embedding"))
    if not _tied(config):
        rows.append(Row("lm_head.weight", "head/table/embedding"))
    return rows


def _kinds(config: Config) -> list[str]:
    """Which layers have a window; configs from before `layer_types` left it to the model."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    if config.get("layer_types") is not None:
        kinds = config["layer_types"]
        if len(kinds) != layers:
            raise ValueError(
                f"the config's layer_types must be one for each of num_hidden_layers={layers}, got "
                f"{len(kinds)}; take both from one config.json"
            )
        return kinds
    windows = config.get("use_sliding_window", not kind.startswith("qwen"))
    if not (windows and config.get("sliding_window")):
        return ["full_attention"] * layers
    if kind.startswith("qwen"):
        refuse(config, use_sliding_window=False)
    every = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": config.get("sliding_window_pattern", 6)}.get(
        kind
    )
    is_full = [every is not None and (i + 1) % every == 0 for i in range(layers)]
    return ["full_attention" if full else "sliding_attention" for full in is_full]


def _is_gemma(config: Config) -> bool:
    return config["model_type"].startswith("gemma")


def _tied(config: Config) -> bool:
    return config.get("tie_word_embeddings", _is_gemma(config))


def _biased(config: Config) -> tuple[str, ...]:
    if config["model_type"] == "qwen2":
        return PROJECTIONS[:3]
    biased = config.get("attention_bias", config["model_type"] == "gpt_oss")
    return PROJECTIONS if biased else ()


def _has_norm(config: Config) -> bool:
    return config["model_type"] in ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
