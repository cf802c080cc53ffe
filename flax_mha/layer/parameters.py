"""The parameters of a kind of attention as a table, from which linen and nnx layers make them."""

import dataclasses
from typing import TypeAlias

from flax.typing import Initializer

from flax_mha.base.shapes import Shape
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.sharding import LogicalNames


@dataclasses.dataclass(frozen=True)
class LinearEntry:
    """A linear map, the parameters `name/kernel` and `name/bias`.

    Attributes:
      inputs: the axes of x that are contracted.
      features: the axes that replace them.
      names: logical names of the kernel's axes, [*inputs, *features].
      has_bias: whether there is a bias [*features].
      rows: logical names of the other axes of the result.
      is_out: whether the initializers are those of the output projection.
    """

    inputs: Shape
    features: Shape
    names: LogicalNames
    has_bias: bool = True
    rows: LogicalNames = ("batch", "length")
    is_out: bool = False


@dataclasses.dataclass(frozen=True)
class NormEntry:
    """A norm over so many features, the parameter `name/scale`."""

    features: int
    norm: QKNorm


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """An array of the layer itself.

    Attributes:
      shape: of the array.
      names: logical names of its axes.
      init: gives it, of a key, the shape and the dtype.
      is_random: whether init reads its key; else nnx draws none, and layers that are made of the
        same `rngs` after this one begin as they would without it.
    """

    shape: Shape
    names: LogicalNames
    init: Initializer
    is_random: bool = True


Entry: TypeAlias = LinearEntry | NormEntry | ArrayEntry
Table: TypeAlias = dict[str, Entry]
