"""Llama, Mistral, Qwen and Gemma: decoders of text with rotary positions and gated MLPs."""

from collections.abc import Callable
from typing import Any

import numpy as np

from flax_mha import masks
from flax_mha.attention import MultiHeadAttention
from flax_mha.blocks import DecoderBlock
from flax_mha.embeddings import TokenEmbedding
from flax_mha.interop.config import Config, activation, in_turn, refuse, rotary
from flax_mha.interop.table import Family, Row, attention, each, linear, norm
from flax_mha.models import LanguageModel
from flax_mha.qk_norm import QKNorm
from flax_mha.scores import SoftCap
from flax_mha.stacks import Decoder

HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")


def llama(config: Config) -> Family:
    """Of `LlamaForCausalLM`, Mistral's, Qwen2's and Qwen3's."""
    return family(config)


def gemma(config: Config) -> Family:
    """Of `Gemma2ForCausalLM` and `Gemma3ForCausalLM`."""
    return family(config, gemma=True)


def family(
    config: Config,
    gemma: bool = False,
    change: Callable[[DecoderBlock], DecoderBlock] = lambda block: block,
    own: list[Row] | None = None,
) -> Family:
    """A decoder of that kind.

    Args:
      config: of the model.
      gemma: whether it is a Gemma.
      change: what its blocks have of their own.
      own: rows of each layer in place of those of the MLP.
    """
    D, layers = config["hidden_size"], config["num_hidden_layers"]
    kinds = _kinds(config)
    model = LanguageModel(
        TokenEmbedding(config["vocab_size"], D, scale=D**0.5 if gemma else 1.0),
        Decoder(layers, tuple(change(_block(config, kind, gemma)) for kind in in_turn(kinds))),
        tied=_tied(config),
        logits_cap=config.get("final_logit_softcapping"),
    )
    ignored = ("lm_head.weight", "*.rotary_emb.inv_freq")
    example = (np.zeros((1, 1), np.int32),)
    return Family(model, example, _rows(config, gemma, own), ignored, prefix="model.")


def _block(config: Config, kind: str, gemma: bool) -> DecoderBlock:
    epsilon, scalar = config["rms_norm_eps"], config.get("query_pre_attn_scalar")
    cap = config.get("attn_logit_softcapping")
    layer = MultiHeadAttention(
        config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim"),
        use_bias=_biased(config),
        rotary=rotary(config, kind),
        mask=masks.Window(config["sliding_window"] - 1, 0) if kind.startswith("slid") else None,
        scale=None if scalar is None else scalar**-0.5,
        scores=() if cap is None else (SoftCap(cap),),
        qk_norm=QKNorm("rmsnorm", epsilon=epsilon) if _has_norm(config) else None,
    )
    return DecoderBlock(
        layer, config["intermediate_size"], norm="rmsnorm", norm_epsilon=epsilon, gated=True,
        activation=activation(config, "hidden_activation", "hidden_act"), branch_norm=gemma,
        mlp_bias=config.get("mlp_bias", False),
    )  # fmt: skip


def _rows(config: Config, gemma: bool, own: list[Row] | None) -> list[Row]:
    theirs, ours = "model.layers.{}", "decoder/layers_{}"
    biased = _biased(config)
    biases: Any = tuple(name in biased for name in ("query", "key", "value", "out"))
    scale: dict[str, Any] = {"bias": False, "offset": 1.0 if gemma else 0.0}
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
    if config.get("layer_types") is not None:
        return config["layer_types"]
    kind, layers = config["model_type"], config["num_hidden_layers"]
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


def _tied(config: Config) -> bool:
    return config.get("tie_word_embeddings", config["model_type"].startswith("gemma"))


def _biased(config: Config) -> tuple[str, ...]:
    if config["model_type"] == "qwen2":
        return ("query", "key", "value")
    biased = config.get("attention_bias", config["model_type"] == "gpt_oss")
    return ("query", "key", "value", "out") if biased else ()


def _has_norm(config: Config) -> bool:
    return config["model_type"] in ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
