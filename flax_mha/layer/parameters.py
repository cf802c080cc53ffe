"""Entries of a table of parameters, from which linen and nnx layers make them."""

import dataclasses
from typing import TypeAlias

from flax.typing import Initializer

from flax_mha.base.shapes import Shape
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.sharding import LogicalNames


@dataclasses.dataclass(frozen=True)
class LinearEntry:
    """A linear map: the parameters `name/kernel` [*inputs, *features] and `name/bias` [*features].

    Attributes:
      inputs: the sizes of the contracted axes of x.
      features: the sizes of the axes that replace them.
      names: the logical names of the kernel's axes.
      has_bias: True for a bias.
      rows: the logical names of the other axes of the result.
      is_out: True for the output projection.
    """

    inputs: Shape
    features: Shape
    names: LogicalNames
    has_bias: bool = True
    rows: LogicalNames = ("batch", "length")
    is_out: bool = False


@dataclasses.dataclass(frozen=True)
class NormEntry:
    """A norm: the parameter `name/scale`.

    Attributes:
      shape: the shape of the scale, with an axis of heads if the norm is over them too.
      norm: the norm.
    """

    shape: Shape
    norm: QKNorm


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """An array of the layer itself.

    Attributes:
      shape: the shape of the array.
      names: the logical names of its axes.
      init: the initializer, of a key, the shape and the dtype.
      is_random: False if init ignores its key, so that nnx draws none.
    """

    shape: Shape
    names: LogicalNames
    init: Initializer
    is_random: bool = True


Entry: TypeAlias = LinearEntry | NormEntry | ArrayEntry
Table: TypeAlias = dict[str, Entry]
