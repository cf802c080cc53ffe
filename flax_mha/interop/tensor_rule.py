"""Rules that map one tensor of a checkpoint to parameters, with the layout of each."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flax_mha.base.shapes import Shape


class Layout(NamedTuple):
    """A conversion between the layouts of an array in a checkpoint and in a module.

    Attributes:
      ours: converts an array to the module's layout, given the shape there.
      theirs: converts an array to the checkpoint's layout.
    """

    ours: Callable[[Any, Shape], Any]
    theirs: Callable[[Any], Any]


SAME = Layout(lambda x, shape: x.reshape(shape), lambda x: x)
# Heads and features joined to one axis.
FLATTENED = Layout(lambda x, shape: x.reshape(shape), lambda x: x.reshape(-1))


def transposed(inputs: int = 1) -> Layout:
    """Return the layout [out, in] of PyTorch's Linear, for a kernel with `inputs` input axes."""
    return Layout(lambda x, shape: x.T.reshape(shape), lambda x: _matrix(x, inputs).T)


def in_out(inputs: int = 1) -> Layout:
    """Return the layout [in, out] of GPT-2's Conv1D, for a kernel with `inputs` input axes."""
    return Layout(lambda x, shape: x.reshape(shape), lambda x: _matrix(x, inputs))


def patches(height: int, width: int) -> Layout:
    """Return the layout [out, channels, height, width] of PyTorch's Conv2d over patches."""

    def theirs(x: Any) -> Any:
        return x.reshape(height, width, -1, x.shape[-1]).transpose(3, 2, 0, 1)

    return Layout(lambda x, shape: x.transpose(2, 3, 1, 0).reshape(shape), theirs)


def wrapped(count: int) -> Layout:
    """Return the layout with `count` leading axes of size 1."""
    return Layout(lambda x, shape: x.reshape(shape), lambda x: x.reshape((1,) * count + x.shape))


def plus(offset: float) -> Layout:
    """Return the layout of a scale minus an offset, such as Gemma's scales minus 1."""

    def add(x: Any, offset: float) -> Any:
        # NumPy alone would promote bfloat16 to float32.
        return (x.astype(np.promote_types(x.dtype, np.float32)) + offset).astype(x.dtype)

    return Layout(lambda x, shape: add(x.reshape(shape), offset), lambda x: add(x, -offset))


def expert() -> Layout:
    """Return the layout [out, in] of one expert in a stack [E, in, out]."""
    return Layout(lambda x, shape: x.T.reshape(shape), lambda x: x[0].T)


def _matrix(x: Any, inputs: int) -> Any:
    return x.reshape(math.prod(x.shape[:inputs]), -1)


class TensorRule(NamedTuple):
    """The rule of one tensor of a checkpoint.

    Attributes:
      theirs: the tensor's name.
      ours: the path of the parameter, or of several parameters that the tensor concatenates.
      axes: the layout of each parameter.
      split: the tensor's axis on which parameters are concatenated.
      heads: the number of heads, if the tensor concatenates the parameters head by head. Its first
        axis is then split into [heads, -1], and `split` counts with both.
      part: the slice (start, stop) of the parameter's first axis, if it is stored as several
        tensors in consecutive rules (default: the whole parameter).
      alternate: True if parameters alternate on the tensor's last axis instead.
    """

    theirs: str
    ours: str | tuple[str, ...]
    axes: Layout = SAME
    split: int = 0
    heads: int | None = None
    part: tuple[int, int] | None = None
    alternate: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the parameters."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def shape(self, parameter: Shape) -> Shape:
        """Return the shape of the slice `part`, given a parameter's shape."""
        return parameter if self.part is None else (self.part[1] - self.part[0], *parameter[1:])

    def split_up(self, x: np.ndarray) -> list[np.ndarray]:
        """Split a tensor into arrays, one for each path."""
        if self.heads is not None:
            x = x.reshape(self.heads, -1, *x.shape[1:])
        if self.alternate:
            return [x[..., i :: len(self.paths)] for i in range(len(self.paths))]
        return np.split(x, len(self.paths), self.split) if len(self.paths) > 1 else [x]

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """Join arrays, one for each path, to the tensor."""
        if self.alternate:
            return np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)
        x = np.concatenate(parts, self.split) if len(parts) > 1 else parts[0]
        return x if self.heads is None else x.reshape(-1, *x.shape[2:])

    def cut(self, x: np.ndarray) -> np.ndarray:
        """Return the slice `part` of a parameter."""
        return x if self.part is None else x[slice(*self.part)]
