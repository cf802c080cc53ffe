"""Readers of settings that the configs of several families share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from flax_mha import positions
from flax_mha.interop.checked_config import REMEDY, Config, filled
from flax_mha.linen import MultiHeadAttention
from flax_mha.models.blocks import EncoderBlock
from flax_mha.positions import Rotary

Item = TypeVar("Item")

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}


def activation(config: Config, *names: str) -> str:
    """Return this package's name of the activation under the first of several keys."""
    return choice(config, next((x for x in names if x in config), names[-1]), ACTIVATIONS)


def block(config: Config, use_bias: bool | tuple[str, ...] = True, **fields: Any) -> EncoderBlock:
    """Return an encoder block by BERT's or ViT's keys, with more fields of the attention layer."""
    return EncoderBlock(
        MultiHeadAttention(config["num_attention_heads"], use_bias=use_bias, **fields),
        config["intermediate_size"],
        activation=activation(config, "hidden_act"),
        norm_epsilon=config["layer_norm_eps"],
    )


def rotary(
    config: Config,
    layer_type: str = FULL,
    theta: float = 1e4,
    partial: bool = False,
    local: bool = False,
) -> Rotary:
    """Return the rotary embedding of a config, from its old or its new keys.

    Args:
      config: the model's config.
      layer_type: the entry of `rope_parameters`, if it has several.
      theta: the default base.
      partial: True if the family can rotate a part of the features.
      local: True for Gemma 3's layers with a window, whose base is `rope_local_base_freq`.
    """
    old: Config = {} if local else config.get("rope_scaling", {})
    new: Config = config.get("rope_parameters", {})
    new = new.get(layer_type, {} if local else new)
    base = config.get("rope_local_base_freq" if local else "rope_theta", theta)
    # If there are both, the old one stays unread: an error.
    rope, fraction = filled(new or old, rope_theta=base), 1.0
    if partial:
        fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    make = choice(rope, "rope_type", _SCALINGS, rope.get("type", "default"))
    return Rotary(rope["rope_theta"], fraction=fraction, scaling=make(rope, config))


def _original_length(rope: Config, config: Config) -> Any:
    name = "original_max_position_embeddings"
    return rope.get(name) or config.get(name) or config["max_position_embeddings"]


def _factor(rope: Config, config: Config) -> Any:
    return rope.get("factor") or config["max_position_embeddings"] / _original_length(rope, config)


def _yarn(rope: Config, config: Config) -> Any:
    known = {"beta_fast", "beta_slow", "attention_factor", "truncate"}
    options = {x: rope[x] for x in known & rope.keys()}
    factor = _factor(rope, config)
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    # As in DeepSeek's code, they count only together.
    if mscale and mscale_all_dim and "attention_factor" not in options and factor > 1:
        over, under = (0.1 * x * math.log(factor) + 1 for x in (mscale, mscale_all_dim))
        options["attention_factor"] = over / under
    return positions.Yarn(factor, _original_length(rope, config), **options)


def _longrope(rope: Config, config: Config) -> Any:
    length, size = _original_length(rope, config), rope.get("attention_factor")
    factor = _factor(rope, config)
    if size is None:
        size = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    short, long = (tuple(rope[x]) for x in ("short_factor", "long_factor"))
    return positions.LongRope(short, long, length, size)


_SCALINGS: dict[str, Any] = {
    "default": lambda rope, config: None,
    "linear": lambda rope, config: positions.Interpolation(rope["factor"]),
    "dynamic": lambda rope, config: positions.DynamicNtk(
        rope["factor"], config["max_position_embeddings"]
    ),
    "llama3": lambda rope, config: positions.Llama3(
        rope["factor"],
        _original_length(rope, config),
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    ),
    "yarn": _yarn,
    "longrope": _longrope,
}


def grid(config: Config) -> tuple[list[int], list[int]]:
    """Return the rows and columns of an image's patches, and the height and width of a patch."""
    height, width = np.broadcast_to(config["image_size"], 2).tolist()
    h, w = np.broadcast_to(config["patch_size"], 2).tolist()
    return [height // h, width // w], [h, w]


def example_image(config: Config) -> tuple[np.ndarray]:
    """Return the arguments that initialize a model of a config's images."""
    (rows, columns), (h, w) = grid(config)
    return (blank(1, rows * h, columns * w, config.get("num_channels", 3)),)


def blank(*shape: int) -> np.ndarray:
    """Return zeros of a shape without allocating memory for them."""
    return np.broadcast_to(np.float32(0), shape)


def repeating_part(items: Sequence[Item]) -> Sequence[Item]:
    """Return the shortest prefix of a list that yields the list when it is repeated."""
    for n in range(1, len(items)):
        if all(item == items[i % n] for i, item in enumerate(items)):
            return items[:n]
    return items


def by_layer(config: Config, name: str, default: Sequence[Any]) -> Sequence[Any]:
    """Return a setting that is a list with an entry for each layer."""
    entries: Sequence[Any] = config.get(name, default)
    if len(entries) != len(default) or not {*entries} <= {FULL, SLIDING, 0, 1}:
        raise ValueError(
            f"the config's {name} must be {FULL} or {SLIDING}, or a flag, for each of "
            f"num_hidden_layers={len(default)}, got {entries!r:.100}; {REMEDY}"
        )
    return entries


def choice(
    config: Config, name: str, options: Mapping[str, Any], default: str | None = None
) -> Any:
    """Return the option that a setting names."""
    value = config[name] if default is None else config.get(name, default)
    if value not in options:
        raise ValueError(
            f"the config's {name} must be one of {sorted(options)}, got {value!r:.100}; build the "
            f"module yourself"
        )
    return options[value]


def refuse(config: Config, **expected: Any) -> None:
    """Check that settings, if present, have the only value that a family supports."""
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ValueError(
                f"the config's {name} must be {value!r}, got {config[name]!r:.100}; use a "
                f"checkpoint with that value, the only one that this family supports"
            )
