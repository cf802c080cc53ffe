"""Llama, Mistral, Qwen, OLMo, Gemma, gpt-oss: decoders with rotary positions, MLPs or experts."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flax_mha import masks
from flax_mha.interop import table
from flax_mha.interop.checked_config import FULL, REMEDY, SLIDING, Config, filled, shown
from flax_mha.interop.shared_settings import activation, by_layer, refuse, repeating_part, rotary
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding
from flax_mha.models.blocks import DecoderBlock
from flax_mha.models.experts import Experts
from flax_mha.positions import Rotary
from flax_mha.scores import SoftCap

# The most experts of all layers, as each has its own rules. Qwen3-235B-A22B has 12,032.
_MAX_EXPERTS = 2**15
_THEIRS, _OURS = "model.layers.{}", "decoder/layers_{}"
HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED_MLP = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
GEMMA_NORMS = NORMS | {
    "post_attention_layernorm": "attention_branch_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_branch_norm",
}
_OLMO_NORMS = {
    "post_attention_layernorm": "attention_branch_norm",
    "post_feedforward_layernorm": "mlp_branch_norm",
}
# Functions of a config and a layer's index, True if that layer has a window.
Windows: TypeAlias = Callable[[Config, int], bool]


def _all(config: Config, i: int) -> bool:
    return True


def _late(config: Config, i: int) -> bool:
    return i >= config.get("max_window_layers", 28)


def _all_but_last(count: int) -> Windows:
    """Return a rule: all but the last of every `count` layers have a window."""
    keys = ("sliding_window_pattern", "_sliding_window_pattern")
    return lambda config, i: (i + 1) % next((config[x] for x in keys if x in config), count) > 0


class LlamaTraits(NamedTuple):
    """The properties of a model type.

    Attributes:
      windows: the rule of layers with a window, or None.
      listed: True if `layer_types` decides instead.
      switched: True if windows also need `use_sliding_window`.
      biases: the projections with a bias; None to read `attention_bias`.
      is_biased: the default of `attention_bias`.
      qk_norm: the norm of queries and keys.
      norms: the block's norms by their names in the checkpoint.
      tied: the default of `tie_word_embeddings`.
      is_gemma: True for Gemma's scales, soft caps, and norms that are stored minus 1.
      theta: the default rotary base.
      is_local: True if layers with a window have another base.
      has_nope: True if some layers have no rotary embedding.
    """

    windows: Windows | None = None
    listed: bool = False
    switched: bool = False
    biases: tuple[str, ...] | None = None
    is_biased: bool = False
    qk_norm: QKNorm | None = None
    norms: Mapping[str, str] = NORMS
    tied: bool = False
    is_gemma: bool = False
    theta: float = 1e4
    is_local: bool = False
    has_nope: bool = False


_GEMMA: dict[str, Any] = {
    "listed": True, "tied": True, "is_gemma": True, "norms": GEMMA_NORMS
}  # fmt: skip
KINDS = {
    "llama": LlamaTraits(),
    "mistral": LlamaTraits(_all),
    "ministral": LlamaTraits(_all, listed=True),
    "qwen2": LlamaTraits(_late, listed=True, switched=True, biases=table.PROJECTIONS[:3]),
    "qwen3": LlamaTraits(_late, listed=True, switched=True, qk_norm=QKNorm()),
    "olmo2": LlamaTraits(qk_norm=QKNorm(over_heads=True), norms=_OLMO_NORMS),
    "smollm3": LlamaTraits(
        lambda config, i: not _rotates(config)[i], listed=True, switched=True, tied=True,
        theta=2e6, has_nope=True,
    ),
    "gemma2": LlamaTraits(_all_but_last(2), **_GEMMA),
    "gemma3_text": LlamaTraits(
        _all_but_last(6), **_GEMMA, qk_norm=QKNorm(), theta=1e6, is_local=True
    ),
    "gpt_oss": LlamaTraits(_all_but_last(2), listed=True, is_biased=True, theta=1.5e5),
    "mixtral": LlamaTraits(_all, theta=1e6),
    "qwen3_moe": LlamaTraits(_all, switched=True, qk_norm=QKNorm()),
}  # fmt: skip


def language_model(
    config: Config, features: int, decoder: Decoder, rows: list[table.TensorRule], tied: bool,
    embedding: str = "model.embed_tokens", head: str = "lm_head",
    ignored: tuple[str, ...] = ("*.rotary_emb.*inv_freq",), heads: tuple[str, ...] = (),
    scale: float = 1.0, **fields: Any,
) -> table.Family:  # fmt: skip
    """Return the family of a decoder with a token embedding and an output head.

    `rows` are the rules of the decoder, `tied` is the default of `tie_word_embeddings`, `embedding`
    (whose first part is optional) and `head` are names in the checkpoint, and `scale` is a factor
    of the embeddings.
    """
    tied = config.get("tie_word_embeddings", tied)
    tokens = TokenEmbedding(config["vocab_size"], features, scale=scale)
    return table.Family(
        LanguageModel(tokens, decoder, tied, **fields), table.TOKEN_EXAMPLE,
        [
            table.TensorRule(f"{embedding}.weight", "embedding/table/embedding"), *rows,
            *table.when(not tied, table.TensorRule(f"{head}.weight", "head/table/embedding")),
        ],
        ignored, heads, embedding.partition(".")[0] + ".",
        {f"{head}.weight": f"{embedding}.weight"},
    )  # fmt: skip


def llama(
    config: Config, mlps: list[Experts | None] | None = None,
    expert_rows: list[table.TensorRule] | None = None, sinks: bool = False,
) -> table.Family:  # fmt: skip
    """Return the family of `LlamaForCausalLM`, Mistral, Qwen2, Qwen3, SmolLM3, Gemma 2 or 3.

    `mlps` are the experts of each layer, or None for a gated MLP, and `expert_rows` their rules.
    """
    traits = KINDS[config["model_type"]]
    D, layers = config["hidden_size"], _layers(config, traits)
    mlps = mlps or [None] * len(layers)
    parts = repeating_part([*zip(layers, mlps, strict=True)])
    blocks = tuple(_block(config, traits, *layer, mlp, sinks) for layer, mlp in parts)
    rows = _rows(config, traits, [mlp is None for mlp in mlps]) + (expert_rows or [])
    gemma: dict[str, Any] = {}
    if traits.is_gemma:
        gemma = {"scale": D**0.5, "logits_cap": config.get("final_logit_softcapping")}
    return language_model(config, D, Decoder(len(layers), blocks), rows, traits.tied, **gemma)


def _layers(config: Config, traits: LlamaTraits) -> list[tuple[int | None, Rotary | None]]:
    """Return the window and the rotary embedding of each layer, each None if it has none."""
    count = config["num_hidden_layers"]
    # Read both rotations, so that all settings are checked.
    theta = 1e4 if traits.is_local else traits.theta
    local_rotary = rotary(config, SLIDING, theta, local=traits.is_local)
    rotations = (rotary(config, FULL, traits.theta), local_rotary)
    rotates = _rotates(config) if traits.has_nope else [True] * count
    has_window = [False] * count
    if (rule := traits.windows) is not None:
        by_rule, window = [rule(config, i) for i in range(count)], config.get("sliding_window")
        if traits.switched and not config.get("use_sliding_window", False):
            window = None
        has_window = by_rule if window is not None else has_window
    default = [SLIDING if x else FULL for x in has_window]
    layer_types = by_layer(config, "layer_types", default)
    if not traits.listed and layer_types != default:
        raise ValueError(
            f"the config's layer_types must agree with the other settings of a "
            f"{config['model_type']}, which does not read them, got {shown(layer_types)}; delete "
            f"them if the weights do without"
        )
    has_window = [x == SLIDING for x in layer_types]
    return [
        (config["sliding_window"] if local else None, rotations[local] if rotated else None)
        for local, rotated in zip(has_window, rotates, strict=True)
    ]


def _rotates(config: Config) -> list[bool]:
    """Return for each layer of a SmolLM3 True if it has a rotary embedding."""
    count, every = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    default = [(i + 1) % every for i in range(count)]
    return [x > 0 for x in by_layer(config, "no_rope_layers", default)]


def _block(
    config: Config, traits: LlamaTraits, window: int | None, rotation: Rotary | None,
    mlp: Experts | None, sinks: bool,
) -> DecoderBlock:  # fmt: skip
    epsilon, gemma = config["rms_norm_eps"], traits.is_gemma
    norm, norms = traits.qk_norm, traits.norms.values()
    scalar = config.get("query_pre_attn_scalar") if gemma else None
    cap = config.get("attn_logit_softcapping") if gemma else None
    layer = MultiHeadAttention(
        config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        use_bias=_biases(config, traits),
        rotary=rotation,
        mask=None if window is None else masks.Window(window - 1, 0),
        scale=None if scalar is None else scalar**-0.5,
        scores=() if cap is None else (SoftCap(cap),),
        qk_norm=None if norm is None else dataclasses.replace(norm, epsilon=epsilon),
        sinks=sinks,
    )
    names = ("hidden_activation", "hidden_act") if gemma else ("hidden_act",)
    return DecoderBlock(
        layer, config["intermediate_size"] if mlp is None else None, norm="rmsnorm",
        norm_epsilon=epsilon, gated=True, mlp=mlp, pre_norm="attention_norm" in norms,
        branch_norm="attention_branch_norm" in norms,
        activation=activation(config, *names), mlp_bias=config.get("mlp_bias", False),
    )  # fmt: skip


def _rows(config: Config, traits: LlamaTraits, has_mlp: list[bool]) -> list[table.TensorRule]:
    """Return the rules of the stack without its experts."""
    scale: dict[str, Any] = {"bias": False, "offset": float(traits.is_gemma)}
    biases = [name in _biases(config, traits) for name in table.PROJECTIONS]
    rows = table.attention(f"{_THEIRS}.self_attn", f"{_OURS}/attention", HEADS, biases)
    for name, part in traits.norms.items():
        rows += table.norm(f"{_THEIRS}.{name}", f"{_OURS}/{part}", **scale)
    for x in ("query", "key") if traits.qk_norm is not None else ():
        theirs, ours = f"{_THEIRS}.self_attn.{x[0]}_norm", f"{_OURS}/attention/{x}_ln"
        rows += table.norm(theirs, ours, **scale)
    mlp_rows = table.parts(
        f"{_THEIRS}.mlp", f"{_OURS}/mlp", GATED_MLP, config.get("mlp_bias", False)
    )
    return [
        *table.per_layer(len(has_mlp), rows),
        *table.per_layer(np.flatnonzero(has_mlp), mlp_rows),
        *table.norm("model.norm", "decoder/norm", **scale),
    ]


def _biases(config: Config, traits: LlamaTraits) -> tuple[str, ...]:
    if traits.biases is not None:
        return traits.biases
    return table.PROJECTIONS if config.get("attention_bias", traits.is_biased) else ()


def gpt_oss(config: Config) -> table.Family:
    """Return the family of `GptOssForCausalLM`, with weights in bfloat16."""
    refuse(config, swiglu_alpha=1.702, hidden_act="silu")
    experts = Experts(
        config["intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"],
        activation="quick_gelu", limit=config.get("swiglu_limit", 7.0), offset=1.0, use_bias=True,
    )  # fmt: skip
    prefix = f"{_THEIRS}.mlp.experts"
    rows = [
        table.TensorRule(f"{_THEIRS}.self_attn.sinks", f"{_OURS}/attention/sinks"),
        *table.linear(f"{_THEIRS}.mlp.router", f"{_OURS}/mlp/router"),
    ]
    for suffix, leaf in (("", "kernel"), ("_bias", "bias")):
        pair = (f"{_OURS}/mlp/gate_{leaf}", f"{_OURS}/mlp/up_{leaf}")
        rows.append(table.TensorRule(f"{prefix}.gate_up_proj{suffix}", pair, alternate=True))
        rows.append(table.TensorRule(f"{prefix}.down_proj{suffix}", f"{_OURS}/mlp/down_{leaf}"))
    layers = config["num_hidden_layers"]
    return llama(config, [experts] * layers, table.per_layer(layers, rows), sinks=True)


def mixtral(config: Config) -> table.Family:
    """Return the family of `MixtralForCausalLM`."""
    experts = Experts(
        config["intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"],
        activation=activation(config, "hidden_act"),
    )  # fmt: skip
    is_sparse = [True] * config["num_hidden_layers"]
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    return _with_experts(config, experts, "block_sparse_moe", names, is_sparse)


def qwen3_moe(config: Config) -> table.Family:
    """Return the family of `Qwen3MoeForCausalLM`, where some layers may have an MLP instead."""
    dense, step = config.get("mlp_only_layers", ()), config.get("decoder_sparse_step", 1)
    # The setting has either name.
    local = config.get("num_local_experts")
    count = (config if local is None else filled(config, num_experts=local))["num_experts"]
    experts = Experts(
        config["moe_intermediate_size"], count, config["num_experts_per_tok"],
        activation=activation(config, "hidden_act"), normalize=config.get("norm_topk_prob", False),
    )  # fmt: skip
    layers = range(config["num_hidden_layers"])
    is_sparse = [i not in dense and (i + 1) % step == 0 for i in layers]
    return _with_experts(config, experts, "mlp", GATED_MLP, is_sparse)


def _with_experts(
    config: Config, experts: Experts, part: str, names: dict[str, str], is_sparse: list[bool]
) -> table.Family:
    """Return a family whose experts have one tensor for each kernel."""
    rows = expert_rows(experts, part, names, is_sparse)
    return llama(config, [experts if sparse else None for sparse in is_sparse], rows)


def expert_rows(
    experts: Experts, part: str, names: dict[str, str], is_sparse: list[bool]
) -> list[table.TensorRule]:
    """Return the rules of the routers and experts, in layers where `is_sparse`.

    `part` is the name of the experts in a layer, and `names` are their kernels' names.
    """
    rows = table.linear(f"{_THEIRS}.{part}.gate", f"{_OURS}/mlp/router", bias=False)
    if len(is_sparse) * experts.num_experts > _MAX_EXPERTS:
        raise ValueError(
            f"the config's layers must have at most {_MAX_EXPERTS:,} experts in all, got "
            f"{len(is_sparse):,} of {experts.num_experts:,}; {REMEDY}"
        )
    for i in range(experts.num_experts):
        for name, kernel in names.items():
            theirs, ours = f"{_THEIRS}.{part}.experts.{i}.{name}.weight", f"{_OURS}/mlp/{kernel}"
            axes, index = table.expert(), (i, i + 1)
            rows.append(table.TensorRule(theirs, f"{ours}_kernel", axes, part=index))
    return table.per_layer((i for i, sparse in enumerate(is_sparse) if sparse), rows)
