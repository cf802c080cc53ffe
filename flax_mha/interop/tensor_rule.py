"""One tensor of a checkpoint: the parameters that lie in it, and the layout of each."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flax_mha.base.shapes import Shape


class Layout(NamedTuple):
    """The layouts of one array in a checkpoint and in a module.

    Attributes:
      ours: makes it ours, given its shape.
      theirs: makes it theirs.
    """

    ours: Callable[[Any, Shape], Any]
    theirs: Callable[[Any], Any]


SAME = Layout(lambda x, shape: x.reshape(shape), lambda x: x)
# Heads × features as one axis.
FLATTENED = Layout(lambda x, shape: x.reshape(shape), lambda x: x.reshape(-1))


def transposed(inputs: int = 1) -> Layout:
    """Return the layout [out, in] of PyTorch's Linear; ours has that many axes for in."""
    return Layout(lambda x, shape: x.T.reshape(shape), lambda x: _matrix(x, inputs).T)


def in_out(inputs: int = 1) -> Layout:
    """Return the layout [in, out] of GPT-2's Conv1D; ours has that many axes for in."""
    return Layout(lambda x, shape: x.reshape(shape), lambda x: _matrix(x, inputs))


def patches(height: int, width: int) -> Layout:
    """Return the layout [out, channels, height, width] of PyTorch's Conv2d over patches."""

    def theirs(x: Any) -> Any:
        return x.reshape(height, width, -1, x.shape[-1]).transpose(3, 2, 0, 1)

    return Layout(lambda x, shape: x.transpose(2, 3, 1, 0).reshape(shape), theirs)


def wrapped(count: int) -> Layout:
    """Return the layout with that many axes of size 1 before ours."""
    return Layout(lambda x, shape: x.reshape(shape), lambda x: x.reshape((1,) * count + x.shape))


def plus(offset: float) -> Layout:
    """Return the layout of a scale kept as its distance from the offset, as Gemma's are from 1."""

    def moved(x: Any, by: float) -> Any:
        # NumPy would make float32 of bfloat16.
        return (x.astype(np.promote_types(x.dtype, np.float32)) + by).astype(x.dtype)

    return Layout(lambda x, shape: moved(x.reshape(shape), offset), lambda x: moved(x, -offset))


def expert() -> Layout:
    """Return the layout [out, in] of one of several Linears; ours are stacked [E, in, out]."""
    return Layout(lambda x, shape: x.T.reshape(shape), lambda x: x[0].T)


def _matrix(x: Any, inputs: int) -> Any:
    return x.reshape(math.prod(x.shape[:inputs]), -1)


class TensorRule(NamedTuple):
    """One tensor of the checkpoint.

    Attributes:
      theirs: its name.
      ours: the path of our parameter, or those of several that lie in it one after another.
      axes: how each lies.
      split: the axis of the tensor on which several lie.
      heads: how many heads, if several lie one after another within each: the tensor's first axis
        is then two, that of heads and axis 1, on which they are split.
      part: from where to where it reaches on the first axis of ours, if several tensors, in rows
        one after another, make up that (default: it is all of it).
      alternate: whether several lie in turn on its last axis, instead of one after another.
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
        """The paths of ours."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def shape(self, ours: Shape) -> Shape:
        """Return the shape of its part of a parameter of ours of that shape."""
        return ours if self.part is None else (self.part[1] - self.part[0], *ours[1:])

    def apart(self, x: np.ndarray) -> list[np.ndarray]:
        """Split a tensor into arrays, one for each path."""
        if self.heads is not None:
            x = x.reshape(self.heads, -1, *x.shape[1:])
        if self.alternate:
            return [x[..., i :: len(self.paths)] for i in range(len(self.paths))]
        return np.split(x, len(self.paths), self.split) if len(self.paths) > 1 else [x]

    def together(self, parts: list[np.ndarray]) -> np.ndarray:
        """Join arrays to the tensor: `apart`, read backwards."""
        if self.alternate:
            return np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)
        x = np.concatenate(parts, self.split) if len(parts) > 1 else parts[0]
        return x if self.heads is None else x.reshape(-1, *x.shape[2:])

    def cut(self, x: np.ndarray) -> np.ndarray:
        """Return its part of a parameter of ours."""
        return x if self.part is None else x[slice(*self.part)]
