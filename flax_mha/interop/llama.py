"""Llama, Mistral, Qwen, OLMo, Gemma, gpt-oss: decoders with rotary positions, MLPs or experts."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flax_mha import masks
from flax_mha.interop.checked_config import Config
from flax_mha.interop.shared_settings import (
    FULL,
    SLIDING,
    activation,
    by_layer,
    refuse,
    repeating_part,
    rotary,
)
from flax_mha.interop.table import (
    PROJECTIONS,
    TOKEN_EXAMPLE,
    Family,
    TensorRule,
    linear,
    norm,
    parts,
    per_layer,
    transposed,
)  # fmt: skip
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding
from flax_mha.models.blocks import DecoderBlock
from flax_mha.models.experts import Experts
from flax_mha.positions import Rotary
from flax_mha.scores import SoftCap

_THEIRS, _OURS = "model.layers.{}", "decoder/layers_{}"
GATED_MLP = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
PARTS = {
    "self_attn.q_proj": "attention/query", "self_attn.k_proj": "attention/key",
    "self_attn.v_proj": "attention/value", "self_attn.o_proj": "attention/out",
    "self_attn.q_norm": "attention/query_ln", "self_attn.k_norm": "attention/key_ln",
    "self_attn.sinks": "attention/sinks",
    "mlp.gate_proj": "mlp/gate", "mlp.up_proj": "mlp/up", "mlp.down_proj": "mlp/down",
}  # fmt: skip
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_OLMO_NORMS = {
    "post_attention_layernorm": "attention_branch_norm",
    "post_feedforward_layernorm": "mlp_branch_norm",
}
GEMMA_NORMS = NORMS | _OLMO_NORMS | {"pre_feedforward_layernorm": "mlp_norm"}
# Types with windows: in all but the last of so many layers; 0 for other rules.
_WINDOWS = {
    "mistral": 0, "ministral": 0, "mixtral": 0, "qwen3_moe": 0, "qwen2": 0, "qwen3": 0,
    "smollm3": 0, "gemma2": 2, "gpt_oss": 2, "gemma3_text": 6,
}  # fmt: skip
# Types whose `layer_types` decide, and types whose windows need `use_sliding_window`.
_LISTED = ("ministral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "gpt_oss")
_SWITCHED = ("qwen2", "qwen3", "smollm3", "qwen3_moe")
_QK_NORMED = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2")
# The default rotary bases that are not 10,000.
_BASES = {"smollm3": 2e6, "gemma3_text": 1e6, "mixtral": 1e6, "gpt_oss": 1.5e5}


def decoder_rows(
    count: int, names: Mapping[str, str], more: Sequence[TensorRule] = (),
    offset: float = 0.0,
) -> list[TensorRule]:  # fmt: skip
    """Return the rules of a decoder: `names` for `parts`, and more rules, of each layer."""
    rows = [*parts(_THEIRS, _OURS, names, offset), *more]
    return per_layer(count, rows) + norm("model.norm", "decoder/norm", offset)


def language_model(
    config: Config, features: int, decoder: Decoder, rows: list[TensorRule], tied: bool,
    embedding: str = "model.embed_tokens", head: str = "lm_head",
    ignored: tuple[str, ...] = ("*.rotary_emb.*inv_freq",), heads: tuple[str, ...] = (),
    scale: float = 1.0, **fields: Any,
) -> Family:  # fmt: skip
    """Return the family of a decoder with a token embedding and an output head.

    `rows` are the decoder's rules, `tied` is the default of `tie_word_embeddings`, and the first
    part of the name `embedding` is optional.
    """
    tokens = TokenEmbedding(config["vocab_size"], features, scale=scale)
    module = LanguageModel(tokens, decoder, config.get("tie_word_embeddings", tied), **fields)
    rows = rows + parts("", "", {embedding: "embedding/table", head: "head/table"})
    copies = {f"{head}.weight": f"{embedding}.weight"}
    prefix = embedding.partition(".")[0] + "."
    return Family(module, TOKEN_EXAMPLE, rows, ignored, heads, prefix, copies)


def llama(
    config: Config, experts: Experts | None = None, more: Sequence[TensorRule] = (),
    sinks: bool = False,
) -> Family:  # fmt: skip
    """Return the family of `LlamaForCausalLM`, Mistral, Qwen2, Qwen3, SmolLM3, Gemma 2 or 3.

    `experts` replace MLPs, and have the rules `more`.
    """
    D, layers, kind = config["hidden_size"], _layers(config), config["model_type"]
    is_gemma = kind.startswith("gemma")
    norms = GEMMA_NORMS if is_gemma else _OLMO_NORMS if kind == "olmo2" else NORMS
    blocks = [
        _block(config, norms.values(), *layer, experts, sinks) for layer in repeating_part(layers)
    ]
    # Gemma stores scales minus 1.
    rows = decoder_rows(len(layers), PARTS | norms, more, float(is_gemma))
    return language_model(
        config, D, Decoder(len(layers), tuple(blocks)), rows, is_gemma or kind == "smollm3",
        scale=D**0.5 if is_gemma else 1.0,
        logits_cap=config.get("final_logit_softcapping") if is_gemma else None,
    )  # fmt: skip


def _layers(config: Config) -> list[tuple[int | None, Rotary | None]]:
    """Return each layer's window and rotary embedding, or None."""
    count, kind = config["num_hidden_layers"], config["model_type"]
    # Read both, so that all settings are checked.
    base, is_local = _BASES.get(kind, 1e4), kind == "gemma3_text"
    local_rotary = rotary(config, SLIDING, 1e4 if is_local else base, local=is_local)
    rotations = (rotary(config, FULL, base), local_rotary)
    rotates: Sequence[Any] = [True] * count
    if kind == "smollm3":
        every = config.get("no_rope_layer_interval", 4)
        rotates = by_layer(config, "no_rope_layers", [(i + 1) % every > 0 for i in range(count)])
    types = [FULL] * count
    if kind in _WINDOWS:
        first = config.get("max_window_layers", 28) if kind in ("qwen2", "qwen3") else 0
        keys = ("sliding_window_pattern", "_sliding_window_pattern")
        every = _WINDOWS[kind] and next((config[x] for x in keys if x in config), _WINDOWS[kind])
        is_on = kind not in _SWITCHED or config.get("use_sliding_window", False)
        for i in range(first, count if config.get("sliding_window") and is_on else 0):
            is_whole = rotates[i] if kind == "smollm3" else every and (i + 1) % every == 0
            types[i] = FULL if is_whole else SLIDING
    if kind in _LISTED:
        types = [*by_layer(config, "layer_types", types)]
    return [
        (config["sliding_window"] if x == SLIDING else None, rotations[x == SLIDING] if y else None)
        for x, y in zip(types, rotates, strict=True)
    ]


def _block(
    config: Config, norms: Collection[str], window: int | None, rotation: Rotary | None,
    mlp: Experts | None, sinks: bool,
) -> DecoderBlock:  # fmt: skip
    epsilon, kind = config["rms_norm_eps"], config["model_type"]
    gemma, qk_norm = kind.startswith("gemma"), None
    if kind in _QK_NORMED:
        qk_norm = QKNorm(epsilon=epsilon, over_heads=kind == "olmo2")
    scalar = config.get("query_pre_attn_scalar") if gemma else None
    cap = config.get("attn_logit_softcapping") if gemma else None
    biases: tuple[str, ...] = PROJECTIONS[:3]
    if kind != "qwen2":
        biases = PROJECTIONS if config.get("attention_bias", kind == "gpt_oss") else ()
    layer = MultiHeadAttention(
        config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        use_bias=biases,
        rotary=rotation,
        mask=None if window is None else masks.Window(window - 1, 0),
        scale=None if scalar is None else scalar**-0.5,
        scores=() if cap is None else (SoftCap(cap),),
        qk_norm=qk_norm,
        sinks=sinks,
    )
    names = ("hidden_activation", "hidden_act") if gemma else ("hidden_act",)
    return DecoderBlock(
        layer, config["intermediate_size"] if mlp is None else None, norm="rmsnorm",
        norm_epsilon=epsilon, gated=True, mlp=mlp, pre_norm="attention_norm" in norms,
        branch_norm="attention_branch_norm" in norms,
        activation=activation(config, *names), mlp_bias=config.get("mlp_bias", False),
    )  # fmt: skip


def gpt_oss(config: Config) -> Family:
    """Return the family of `GptOssForCausalLM`, with weights in bfloat16."""
    refuse(config, swiglu_alpha=1.702, hidden_act="silu")
    experts = Experts(
        config["intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"],
        activation="quick_gelu", limit=config.get("swiglu_limit", 7.0), offset=1.0, use_bias=True,
    )  # fmt: skip
    theirs, ours = f"{_THEIRS}.mlp.experts", f"{_OURS}/mlp"
    rows = linear(f"{_THEIRS}.mlp.router", f"{ours}/router")
    # Gates alternate with the other hidden features.
    turns = (lambda x, shape: x.reshape(shape), lambda x: x[..., None])
    for suffix, leaf, split in (("", "kernel", 3), ("_bias", "bias", 2)):
        pair = (f"{ours}/gate_{leaf}", f"{ours}/up_{leaf}")
        rows += [
            TensorRule(f"{theirs}.gate_up_proj{suffix}", pair, turns, split, merged=True),
            TensorRule(f"{theirs}.down_proj{suffix}", f"{ours}/down_{leaf}"),
        ]
    return llama(config, experts, rows, sinks=True)


def mixtral(config: Config) -> Family:
    """Return the family of `MixtralForCausalLM`."""
    experts = Experts(
        config["intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"],
        activation=activation(config, "hidden_act"),
    )  # fmt: skip
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    return llama(config, experts, expert_rows(experts, "block_sparse_moe", names))


def qwen3_moe(config: Config) -> Family:
    """Return the family of `Qwen3MoeForCausalLM`."""
    # The setting has either name.
    count = config.get("num_experts", config.get("num_local_experts"))
    experts = Experts(
        config["moe_intermediate_size"], count, config["num_experts_per_tok"],
        activation=activation(config, "hidden_act"), normalize=config.get("norm_topk_prob", False),
    )  # fmt: skip
    return llama(config, experts, expert_rows(experts, "mlp", GATED_MLP))


def expert_rows(experts: Experts, part: str, names: Mapping[str, str]) -> list[TensorRule]:
    """Return the rules of a layer's router and of its experts' kernels, which have these names."""
    rows = linear(f"{_THEIRS}.{part}.gate", f"{_OURS}/mlp/router")
    for i in range(experts.num_experts):
        for name, kernel in names.items():
            theirs, ours = f"{_THEIRS}.{part}.experts.{i}.{name}.weight", f"{_OURS}/mlp/{kernel}"
            # The kernel [out, in] of one expert, from [1, in, out].
            one = slice(i, i + 1)
            rows.append(TensorRule(theirs, f"{ours}_kernel", transposed(2), part=one))
    return rows
