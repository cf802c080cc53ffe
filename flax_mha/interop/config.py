"""What configs of several families say in the same way."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_mha import positions
from flax_mha.interop.settings import Config, filled, shown
from flax_mha.positions import Rotary

# Of one image. A model is built with all of them, and Axial makes a table of them.
_MOST_PATCHES = 2**16

ACTIVATIONS = {
    "gelu": "gelu_exact", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu",
    "relu": "relu", "quick_gelu": "quick_gelu", "silu": "silu",
}  # fmt: skip


def activation(config: Config, *names: str) -> str:
    """The first of those settings that is there, by our name."""
    name = next((name for name in names if config.get(name) is not None), names[-1])
    given = config[name]
    if given not in ACTIVATIONS:
        raise ValueError(
            f"the config's activation must be one of {sorted(ACTIVATIONS)}, got {shown(given)}; "
            f"build the module yourself with a function"
        )
    return ACTIVATIONS[given]


def rotary(config: Config, kind: str = "") -> Rotary:
    """The rotation of layers of that kind, as old and new configs write it."""
    local = config.get("rope_local_base_freq")
    if local is not None and kind == "sliding_attention" and not config.get("rope_parameters"):
        return Rotary(local)  # As Gemma 3 wrote it; what is scaled are its other layers.
    old: Config = config.get("rope_scaling") or {}
    new: Config = config.get("rope_parameters") or {}
    given = filled(new.get(kind, new), old, rope_theta=config.get("rope_theta", 1e4))
    fraction: float = given.get("partial_rotary_factor") or config.get("partial_rotary_factor", 1.0)
    return Rotary(given["rope_theta"], fraction=fraction, scaling=_scaling(given, config))


def _scaling(given: Config, config: Config) -> Any:
    name = given.get("rope_type", given.get("type", "default"))
    if name == "default":
        return None
    if name == "linear":
        return positions.Interpolation(given["factor"])
    if name not in ("llama3", "yarn"):
        raise ValueError(
            f"the config's rope_type must be default, linear, llama3 or yarn, got {shown(name)}; "
            f"build the module yourself with a rotation of your own"
        )
    original = "original_max_position_embeddings"
    longest = given[original] if original in given else config["max_position_embeddings"]
    if name == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        return positions.Llama3(given["factor"], longest, low, high)
    known = {"beta_fast", "beta_slow", "attention_factor", "truncate"}
    return positions.Yarn(given["factor"], longest, **{x: given[x] for x in known & given.keys()})


def grid(config: Config, image: str = "image_size") -> tuple[int, int, int, int]:
    """Return how many patches an image has in a column and in a row, and their height and width."""
    (height, width), (h, w) = (
        np.broadcast_to(config[name], 2).tolist() for name in (image, "patch_size")
    )
    rows, columns = height // h, width // w
    if not 0 < rows * columns <= _MOST_PATCHES:
        raise ValueError(
            f"the config's {image} must have 1 … {_MOST_PATCHES:,} patches of its patch_size, got "
            f"{height} × {width} of {h} × {w}; take both from one config.json"
        )
    return rows, columns, h, w


def blank(*shape: int) -> np.ndarray:
    """Return an example of zeros, behind which stands no memory."""
    return np.broadcast_to(np.float32(0), shape)


def in_turn(kinds: Sequence[str]) -> Sequence[str]:
    """The shortest part of a list that gives all of it again and again."""
    for n in range(1, len(kinds)):
        if all(kind == kinds[i % n] for i, kind in enumerate(kinds)):
            return kinds[:n]
    return kinds


def refuse(config: Config, **expected: Any) -> None:
    """What a config may say in one way only, for there is no other in our module."""
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ValueError(
                f"the config's {name} must be {value!r}, got {shown(config[name])}; the table of "
                f"this family knows no other"
            )
