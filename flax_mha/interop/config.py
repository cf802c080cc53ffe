"""Settings that configs of several families write in the same way."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flax_mha import positions
from flax_mha.interop.settings import FULL, Config, filled, shown
from flax_mha.positions import Rotary

Item = TypeVar("Item")

# Of one image. A model is built with all of them, and Axial makes a table of them.
_MOST_PATCHES = 2**16

ACTIVATIONS = {
    "gelu": "gelu_exact", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu",
    "relu": "relu", "quick_gelu": "quick_gelu", "silu": "silu",
}  # fmt: skip


def activation(config: Config, *names: str) -> str:
    """Return the first of those settings that is there, by our name."""
    name = next((name for name in names if config.get(name) is not None), names[-1])
    theirs = config[name]
    if theirs not in ACTIVATIONS:
        raise ValueError(
            f"the config's activation must be one of {sorted(ACTIVATIONS)}, got {shown(theirs)}; "
            f"build the module yourself with a function"
        )
    return ACTIVATIONS[theirs]


def rotary(
    config: Config, layer_type: str = FULL, theta: float = 1e4, partial: bool = False,
    local: bool = False,
) -> Rotary:  # fmt: skip
    """Return the rotation of layers of that type, as old and new configs write it.

    Args:
      config: of the model.
      layer_type: by which `rope_parameters` may have several.
      theta: the base, if it is not said.
      partial: whether the model can turn a part of the features.
      local: whether layers of that type have a base of their own, which alone is theirs of the
        settings that are not in `rope_parameters` (Gemma 3).
    """
    old: Config = {} if local else config.get("rope_scaling") or {}
    new: Config = config.get("rope_parameters") or {}
    new = new.get(layer_type, {} if local else new)
    if differing := [x for x in old if x in new and old[x] != new[x]]:
        raise ValueError(
            f"the config's rope_scaling and rope_parameters must not differ, got {differing} in "
            f"both; delete one of the two"
        )
    base = config.get("rope_local_base_freq" if local else "rope_theta", theta)
    rope = filled(new, old, rope_theta=base)
    outer = config.get("partial_rotary_factor", 1.0)
    fraction: float = rope.get("partial_rotary_factor", outer)
    if not partial and {fraction, outer} != {1}:
        raise ValueError(
            f"the config's partial_rotary_factor must be 1, got {min(fraction, outer)}: this "
            f"family turns all features; delete it if its weights do"
        )
    return Rotary(rope["rope_theta"], fraction=fraction, scaling=_scaling(rope, config))


def _scaling(rope: Config, config: Config) -> Any:
    name = rope.get("rope_type", rope.get("type", "default"))
    if name not in _SCALINGS:
        raise ValueError(
            f"the config's rope_type must be one of {sorted(_SCALINGS)}, got {shown(name)}; build "
            f"the module yourself with a rotation of your own"
        )
    return _SCALINGS[name](rope, config)


def _original(rope: Config, config: Config) -> int:
    """Return the length of training."""
    name = "original_max_position_embeddings"
    said = {each[name] for each in (rope, config) if name in each}
    if len(said) > 1:
        raise ValueError(
            f"the config's {name} must be the same everywhere, got {sorted(said)}; take the one of "
            f"training"
        )
    length: int = said.pop() if said else config["max_position_embeddings"]
    return length


def _factor(rope: Config, config: Config) -> float:
    if "factor" in rope:
        factor: float = rope["factor"]
        return factor
    longest: int = config["max_position_embeddings"]
    return longest / _original(rope, config)


def _llama3(rope: Config, config: Config) -> Any:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    return positions.Llama3(rope["factor"], _original(rope, config), low, high)


def _yarn(rope: Config, config: Config) -> Any:
    known = {"beta_fast", "beta_slow", "attention_factor", "truncate"}
    options = {x: rope[x] for x in known & rope.keys()}
    factor = _factor(rope, config)
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    # As DeepSeek has it: both or none.
    if over and under and "attention_factor" not in options and factor > 1:
        over, under = (0.1 * x * math.log(factor) + 1 for x in (over, under))
        options["attention_factor"] = over / under
    return positions.Yarn(factor, _original(rope, config), **options)


def _longrope(rope: Config, config: Config) -> Any:
    length, size = _original(rope, config), rope.get("attention_factor")
    factor = _factor(rope, config)
    if size is None:
        size = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    short, long = (tuple(rope[x]) for x in ("short_factor", "long_factor"))
    return positions.LongRope(short, long, length, size)


_SCALINGS: dict[str, Callable[[Config, Config], Any]] = {
    "default": lambda rope, config: None,
    "linear": lambda rope, config: positions.Interpolation(rope["factor"]),
    "dynamic": lambda rope, config: positions.DynamicNtk(
        rope["factor"], config["max_position_embeddings"]
    ),
    "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
}  # fmt: skip


class Grid(NamedTuple):
    """The patches of an image: how many in a column and in a row, and their height and width."""

    rows: int
    columns: int
    height: int
    width: int

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return self.height, self.width

    def image(self, channels: int) -> np.ndarray:
        """Return an example of an image."""
        return blank(1, self.rows * self.height, self.columns * self.width, channels)


def grid(config: Config, image: str = "image_size") -> Grid:
    """Return the patches of the images that a config names."""
    (height, width), (h, w) = (
        np.broadcast_to(config[name], 2).tolist() for name in (image, "patch_size")
    )
    rows, columns = height // h, width // w
    if not 0 < rows * columns <= _MOST_PATCHES:
        raise ValueError(
            f"the config's {image} must have 1 … {_MOST_PATCHES:,} patches of its patch_size, got "
            f"{height} × {width} of {h} × {w}; take both from one config.json"
        )
    return Grid(rows, columns, h, w)


def blank(*shape: int) -> np.ndarray:
    """Return an example of zeros, behind which stands no memory."""
    return np.broadcast_to(np.float32(0), shape)


def in_turn(items: Sequence[Item]) -> Sequence[Item]:
    """Return the shortest part of a list that gives all of it again and again."""
    for n in range(1, len(items)):
        if all(item == items[i % n] for i, item in enumerate(items)):
            return items[:n]
    return items


def refuse(config: Config, **expected: Any) -> None:
    """Refuse settings that differ from the only value that our module can take."""
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ValueError(
                f"the config's {name} must be {value!r}, got {shown(config[name])}; the table of "
                f"this family knows no other"
            )
