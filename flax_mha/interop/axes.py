"""The layouts of one array in a checkpoint and in a module."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flax_mha.base.shapes import Shape


class Axes(NamedTuple):
    """The layouts of one array in a checkpoint and in a module.

    Attributes:
      ours: makes it ours, of that shape.
      theirs: makes it theirs.
    """

    ours: Callable[[Any, Shape], Any]
    theirs: Callable[[Any], Any]


SAME = Axes(lambda x, shape: x.reshape(shape), lambda x: x)
# Heads × features as one axis.
FLAT = Axes(lambda x, shape: x.reshape(shape), lambda x: x.reshape(-1))


def transposed(inputs: int = 1) -> Axes:
    """[out, in], as PyTorch's Linear; ours has the given number of axes for in."""
    return Axes(lambda x, shape: x.T.reshape(shape), lambda x: _matrix(x, inputs).T)


def straight(inputs: int = 1) -> Axes:
    """[in, out], as GPT-2's Conv1D."""
    return Axes(lambda x, shape: x.reshape(shape), lambda x: _matrix(x, inputs))


def patches(height: int, width: int) -> Axes:
    """[out, channels, height, width], as PyTorch's Conv2d over patches."""

    def theirs(x: Any) -> Any:
        return x.reshape(height, width, -1, x.shape[-1]).transpose(3, 2, 0, 1)

    return Axes(lambda x, shape: x.transpose(2, 3, 1, 0).reshape(shape), theirs)


def wrapped(count: int) -> Axes:
    """With so many axes of size 1 before ours."""
    return Axes(lambda x, shape: x.reshape(shape), lambda x: x.reshape((1,) * count + x.shape))


def plus(offset: float) -> Axes:
    """A scale that is kept as its distance from the offset, as Gemma's norms are from 1."""

    def moved(x: Any, by: float) -> Any:
        # NumPy would make float32 of bfloat16.
        return (x.astype(np.promote_types(x.dtype, np.float32)) + by).astype(x.dtype)

    return Axes(lambda x, shape: moved(x.reshape(shape), offset), lambda x: moved(x, -offset))


def one_of_many() -> Axes:
    """[out, in] of one of several Linears, which ours has on an axis before [in, out]."""
    return Axes(lambda x, shape: x.T.reshape(shape), lambda x: x[0].T)


def _matrix(x: Any, inputs: int) -> Any:
    return x.reshape(math.prod(x.shape[:inputs]), -1)
