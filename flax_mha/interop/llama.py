"""Llama, Mistral, Qwen and Gemma: decoders of text with rotary positions and gated MLPs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flax_mha import masks
from flax_mha.interop import table
from flax_mha.interop.config import activation, in_turn, rotary
from flax_mha.interop.settings import FULL, SLIDING, Config, shown
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding
from flax_mha.models.blocks import DecoderBlock
from flax_mha.models.experts import Experts
from flax_mha.positions import Rotary
from flax_mha.scores import SoftCap

HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_BRANCH_NORMS = _NORMS | {
    "post_attention_layernorm": "attention_branch_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_branch_norm",
}


def _all(config: Config, i: int) -> bool:
    return True


def _unturned(config: Config, i: int) -> bool:
    return not _turned(config)[i]


def _each(count: int) -> Callable[[Config, int], bool]:
    """Return a rule by which the last of so many layers in succession has no window."""

    def has_window(config: Config, i: int) -> bool:
        patterns = ("sliding_window_pattern", "_sliding_window_pattern")
        return bool((i + 1) % next((config[x] for x in patterns if x in config), count))

    return has_window


def _late(config: Config, i: int) -> bool:
    return i >= config.get("max_window_layers", 28)


class LlamaTraits(NamedTuple):
    """The record of a model type.

    Attributes:
      windows: whether layer i has a window, if the config has `sliding_window`; None for none.
      listed: whether `layer_types` says that instead, where it is given.
      switched: whether windows need `use_sliding_window`.
      biases: the projections that have one; None if `attention_bias` says so.
      is_biased: what `attention_bias` is if it is not said.
      qk_norm: whether queries and keys are normed.
      branch_norm: whether what attention and MLP give is normed, too.
      offset: what scales of norms are kept without.
      tied: whether the table of tokens gives the logits, if that is not said.
      is_gemma: whether embeddings are scaled by √D, and scores and logits as Gemma's config says.
      theta: the base of the rotation, if it is not said.
      is_local: whether layers with a window have a base of their own.
      has_unturned: whether there are layers without rotation.
    """

    windows: Callable[[Config, int], bool] | None = None
    listed: bool = False
    switched: bool = False
    biases: tuple[str, ...] | None = None
    is_biased: bool = False
    qk_norm: bool = False
    branch_norm: bool = False
    offset: float = 0.0
    tied: bool = False
    is_gemma: bool = False
    theta: float = 1e4
    is_local: bool = False
    has_unturned: bool = False


_GEMMA: dict[str, Any] = {
    "listed": True, "branch_norm": True, "offset": 1.0, "tied": True, "is_gemma": True,
}  # fmt: skip
KINDS = {
    "llama": LlamaTraits(),
    "mistral": LlamaTraits(_all),
    "ministral": LlamaTraits(_all, listed=True),
    "qwen2": LlamaTraits(_late, listed=True, switched=True, biases=table.PROJECTIONS[:3]),
    "qwen3": LlamaTraits(_late, listed=True, switched=True, qk_norm=True),
    "smollm3": LlamaTraits(
        _unturned, listed=True, switched=True, tied=True, theta=2e6, has_unturned=True
    ),
    "gemma2": LlamaTraits(_each(2), **_GEMMA),
    "gemma3_text": LlamaTraits(_each(6), **_GEMMA, qk_norm=True, theta=1e6, is_local=True),
    "gpt_oss": LlamaTraits(_each(2), listed=True, is_biased=True, theta=1.5e5),
    "mixtral": LlamaTraits(_all, theta=1e6),
    "qwen3_moe": LlamaTraits(_all, switched=True, qk_norm=True),
}


class Layer(NamedTuple):
    """The settings of one layer: a window, or None; and a rotation, or None."""

    window: int | None
    rotary: Rotary | None


def llama(
    config: Config, mlps: list[Experts | None] | None = None,
    expert_rows: list[table.TensorRule] | None = None, sinks: bool = False,
) -> table.Family:  # fmt: skip
    """Return the family of `LlamaForCausalLM`, Mistral, Qwen2, Qwen3, SmolLM3, Gemma 2 or 3.

    Args:
      config: of the model.
      mlps: of each layer its experts, or None for a gated MLP (default: None for all).
      expert_rows: of the experts.
      sinks: whether its attention has them.
    """
    record = KINDS[config["model_type"]]
    D, tied = config["hidden_size"], config.get("tie_word_embeddings", record.tied)
    layers = _layers(config, record)
    mlps = mlps or [None] * len(layers)
    parts = in_turn([*zip(layers, mlps, strict=True)])
    model = LanguageModel(
        TokenEmbedding(config["vocab_size"], D, scale=D**0.5 if record.is_gemma else 1.0),
        Decoder(
            len(layers), tuple(_block(config, record, layer, mlp, sinks) for layer, mlp in parts)
        ),
        tied=tied,
        logits_cap=config.get("final_logit_softcapping") if record.is_gemma else None,
    )
    rows = _rows(config, record, [mlp is None for mlp in mlps]) + (expert_rows or [])
    rows += table.when(not tied, table.TensorRule("lm_head.weight", "head/table/embedding"))
    copies = {"lm_head.weight": "model.embed_tokens.weight"}
    return table.Family(
        model, (np.zeros((1, 1), np.int32),), rows, ("*.rotary_emb.inv_freq",), prefix="model.",
        copies=copies,
    )  # fmt: skip


def _layers(config: Config, record: LlamaTraits) -> list[Layer]:
    """Return the parts in which layers differ."""
    count = config["num_hidden_layers"]
    # Both are made, so that no setting of either is passed over.
    theta = 1e4 if record.is_local else record.theta
    turns = (
        rotary(config, FULL, record.theta),
        rotary(config, SLIDING, theta, local=record.is_local),
    )
    turned = _turned(config) if record.has_unturned else [True] * count
    has_window = [False] * count
    if (rule := record.windows) is not None:
        placed, is_on = [rule(config, i) for i in range(count)], config.get("sliding_window")
        if record.switched and not config.get("use_sliding_window", False):
            is_on = None
        has_window = placed if is_on is not None else has_window
    layer_types = config.get("layer_types")
    if layer_types is not None and len(layer_types) != count:
        raise ValueError(
            f"the config's layer_types must be one for each of num_hidden_layers={count}, got "
            f"{len(layer_types)}; take both from one config.json"
        )
    if layer_types is not None and record.listed:
        has_window = [x == SLIDING for x in layer_types]
    elif layer_types is not None and has_window != [x == SLIDING for x in layer_types]:
        raise ValueError(
            f"the config's layer_types must say of a {config['model_type']} what its other "
            f"settings say, which alone it reads, got {shown(layer_types)}; delete it if its "
            f"weights do without"
        )
    return [
        Layer(config["sliding_window"] if local else None, turns[local] if turn else None)
        for local, turn in zip(has_window, turned, strict=True)
    ]


def _turned(config: Config) -> list[bool]:
    """Return which layers have a rotation, by a config of SmolLM3."""
    count, every = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers", [(i + 1) % every for i in range(count)])
    if len(turns) != count:
        raise ValueError(
            f"the config's no_rope_layers must be one for each of num_hidden_layers={count}, got "
            f"{len(turns)}; take both from one config.json"
        )
    return [x > 0 for x in turns]


def _block(
    config: Config, record: LlamaTraits, part: Layer, mlp: Experts | None, sinks: bool
) -> DecoderBlock:  # fmt: skip
    epsilon, gemma = config["rms_norm_eps"], record.is_gemma
    scalar = config.get("query_pre_attn_scalar") if gemma else None
    cap = config.get("attn_logit_softcapping") if gemma else None
    layer = MultiHeadAttention(
        config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        use_bias=_biased(config, record),
        rotary=part.rotary,
        mask=None if part.window is None else masks.Window(part.window - 1, 0),
        scale=None if scalar is None else scalar**-0.5,
        scores=() if cap is None else (SoftCap(cap),),
        qk_norm=QKNorm("rmsnorm", epsilon=epsilon) if record.qk_norm else None,
        sinks=sinks,
    )
    names = ("hidden_activation", "hidden_act") if gemma else ("hidden_act",)
    return DecoderBlock(
        layer, config["intermediate_size"] if mlp is None else None, norm="rmsnorm",
        norm_epsilon=epsilon, gated=True, branch_norm=record.branch_norm, mlp=mlp,
        activation=activation(config, *names), mlp_bias=config.get("mlp_bias", False),
    )  # fmt: skip


def _rows(config: Config, record: LlamaTraits, plain: list[bool]) -> list[table.TensorRule]:
    """Return the rows of all layers, with an MLP in those that have a plain one."""
    theirs, ours = "model.layers.{}", "decoder/layers_{}"
    scale: dict[str, Any] = {"bias": False, "offset": record.offset}
    biases = [name in _biased(config, record) for name in table.PROJECTIONS]
    rows = table.attention(f"{theirs}.self_attn", f"{ours}/attention", HEADS, biases)
    names = _BRANCH_NORMS if record.branch_norm else _NORMS
    if record.qk_norm:
        names = names | {
            "self_attn.q_norm": "attention/query_ln", "self_attn.k_norm": "attention/key_ln"
        }  # fmt: skip
    for name, mine in names.items():
        rows += table.norm(f"{theirs}.{name}", f"{ours}/{mine}", **scale)
    rows = table.per_layer(len(plain), rows)
    for name in ("gate", "up", "down"):
        at = (f"{theirs}.mlp.{name}_proj", f"{ours}/mlp/{name}")
        rows += table.per_layer(
            np.flatnonzero(plain), table.linear(*at, config.get("mlp_bias", False))
        )
    rows += table.norm("model.norm", "decoder/norm", **scale)
    return [*rows, table.TensorRule("model.embed_tokens.weight", "embedding/table/embedding")]


def _biased(config: Config, record: LlamaTraits) -> tuple[str, ...]:
    if record.biases is not None:
        return record.biases
    return table.PROJECTIONS if config.get("attention_bias", record.is_biased) else ()
