"""Gemma 4, the text model without experts: layers differ in their heads and in their values."""

from typing import Any

from flax_mha import masks
from flax_mha.interop import table
from flax_mha.interop.checked_config import REMEDY, Config, filled
from flax_mha.interop.llama import GEMMA_NORMS, PARTS, decoder_rows, language_model
from flax_mha.interop.shared_settings import (
    FULL,
    SLIDING,
    activation,
    by_layer,
    choice,
    refuse,
    repeating_part,
)
from flax_mha.layer import core
from flax_mha.layer.parameters import NormEntry, Table
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Decoder
from flax_mha.models.blocks import DecoderBlock
from flax_mha.positions import Rotary
from flax_mha.positions.rope_scaling import Proportional

_ROTATIONS: dict[str, Config] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


class Gemma4Attention(MultiHeadAttention):
    """Attention with an RMSNorm of the values, without a scale.

        v ← v / √(mean(v²) + ε),   v = x W_v, or x W_k of the keys before their norm

    Attributes:
      keys_as_values: True to take the values from W_k, so that there is no W_v.
    """

    keys_as_values: bool = False

    def table(self: Any, D: int, Dk: int, Dv: int) -> Table:
        """Return the parameters. The norm of values has the epsilon of `qk_norm`."""
        entries = super().table(D, Dk, Dv)
        if self.keys_as_values:
            entries.pop("value", None)
        norm = QKNorm(scale=False, epsilon=self.qk_norm.epsilon)
        return entries | {"value_ln": NormEntry(self.sizes(D)[3:], norm)}

    def compute(self, p: Any, x_q: Any, x_k: Any, x_v: Any, call: Any, cache: Any) -> core.Output:
        """Return the output of the layer."""
        with_values = p | {"value": p["key"]} if self.keys_as_values and "key" in p else p
        heads = core.project_heads(with_values, self, x_q, x_k, x_v, call, cache)
        if heads.v is not None:
            heads = heads._replace(v=p["value_ln"](heads.v))
        return core.attend(p, self, heads, call, cache)


def gemma4(config: Config) -> table.Family:
    """Return the family of `Gemma4ForCausalLM`, without experts and per-layer embeddings."""
    refuse(
        filled(config, hidden_size_per_layer_input=256), hidden_size_per_layer_input=0,
        num_kv_shared_layers=0, enable_moe_block=False,
    )  # fmt: skip
    D, count = config["hidden_size"], config["num_hidden_layers"]
    default = [SLIDING if (i + 1) % 6 and i < count - 1 else FULL for i in range(count)]
    types, same = by_layer(config, "layer_types", default), config.get("attention_k_eq_v", False)
    if types[-1] != FULL:
        raise ValueError(
            f"the config's layer_types must make the last {FULL}, got {types!r:.100}; {REMEDY}"
        )
    rotations = {name: _rotary(config, name) for name in _ROTATIONS}
    window, epsilon = config["sliding_window"], config["rms_norm_eps"]

    def block(kind: str, head_dim: int, kv_heads: int) -> DecoderBlock:
        layer = Gemma4Attention(
            config["num_attention_heads"], num_kv_heads=kv_heads, head_dim=head_dim,
            use_bias=config.get("attention_bias", False), scale=1.0, rotary=rotations[kind],
            qk_norm=QKNorm(epsilon=epsilon),
            mask=masks.Window(window - 1, 0) if kind == SLIDING else None,
            keys_as_values=same and kind == FULL,
        )  # fmt: skip
        return DecoderBlock(
            layer, config["intermediate_size"], norm="rmsnorm", norm_epsilon=epsilon, gated=True,
            activation=activation(config, "hidden_activation"), branch_norm=True, mlp_bias=False,
            output_scale=1.0,
        )  # fmt: skip

    parts = repeating_part([(x, *_heads(config, x, i, same)) for i, x in enumerate(types)])
    rows = decoder_rows(count, PARTS | GEMMA_NORMS | {"layer_scalar": "output_scale"})
    decoder = Decoder(count, tuple(block(*part) for part in parts))
    cap = config.get("final_logit_softcapping")
    return language_model(config, D, decoder, rows, True, scale=D**0.5, logits_cap=cap)


def _heads(config: Config, kind: str, i: int, same: bool) -> tuple[int, int]:
    """Return a layer's features of a head, and its number of key/value heads."""
    usual = (config["head_dim"], config["num_key_value_heads"])
    size, count = config.get("global_head_dim", 512), config.get("num_global_key_value_heads")
    by_layer: Config | None = config.get("per_layer_config")
    if by_layer is not None:
        own: Config = by_layer.get(str(i), {})
        return own.get("head_dim", usual[0]), own.get("num_key_value_heads", usual[1])
    return (size, count if same and count else usual[1]) if kind == FULL else usual


def _rotary(config: Config, kind: str) -> Rotary:
    rope: Config = (config.get("rope_parameters") or _ROTATIONS).get(kind, _ROTATIONS[kind])
    options = {"default": False, "proportional": True}
    if not choice(rope, "rope_type", options, "default"):
        return Rotary(rope["rope_theta"])
    share, factor = rope.get("partial_rotary_factor", 1.0), rope.get("factor", 1.0)
    return Rotary(rope["rope_theta"], scaling=Proportional(share, factor))
