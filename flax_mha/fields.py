"""What fields of modules say, read in the same way wherever they stand."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn

from flax_mha import inputs, shapes

PROJECTIONS = ("query", "key", "value", "out", "output_gate")


def has_bias(use_bias: bool | Sequence[str], name: str) -> bool:
    """Whether the projection of that name has a bias, by a layer's field."""
    if not isinstance(use_bias, list | tuple):
        return inputs.flag("use_bias", use_bias)
    if not set(use_bias) <= {*PROJECTIONS}:
        raise ValueError(
            f"use_bias must be True, False, or names of projections, of {list(PROJECTIONS)}, got "
            f"{use_bias!r}"
        )
    return name in use_bias


def learns_scale(scale: Any) -> bool:
    """Whether a layer's field `scale` says so."""
    if isinstance(scale, str) and scale != "learned":
        raise ValueError(f"scale must be a number or 'learned', got {scale!r}")
    return isinstance(scale, str)


def gate_features(kind: str | None, N: int, Hv: int) -> shapes.Shape:
    """The features of a layer's gate; none of no gate."""
    if kind is None:
        return ()
    return inputs.choose("gate", kind, {"head": (N, 1), "feature": (N, Hv)})


def check_module(name: str, module: Any, kind: type[nn.Module]) -> None:
    """The field of that name must be a module of that kind, whose own fields are read."""
    if not isinstance(module, kind):
        raise TypeError(
            f"{name} must be a flax_mha.{kind.__name__}, got {type(module).__name__}; "
            f"build one with the options of yours"
        )
