"""Tables between the tensors of a checkpoint and the parameters of a module, read both ways."""

import fnmatch
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_mha.base.shapes import Shape
from flax_mha.interop import device_put
from flax_mha.interop.axes import FLAT as FLAT
from flax_mha.interop.axes import SAME as SAME
from flax_mha.interop.axes import Axes as Axes
from flax_mha.interop.axes import one_of_many as one_of_many
from flax_mha.interop.axes import patches as patches
from flax_mha.interop.axes import plus as plus
from flax_mha.interop.axes import straight as straight
from flax_mha.interop.axes import transposed as transposed
from flax_mha.interop.axes import wrapped as wrapped
from flax_mha.interop.settings import several

Tensors: TypeAlias = Mapping[str, Any]


class Row(NamedTuple):
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
    axes: Axes = SAME
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


PROJECTIONS = ("query", "key", "value", "out")
# What follows a name in PyTorch, of the kernel and of the bias.
LEAVES = (".weight", ".bias")
# As TensorFlow named the arrays of a norm, which the oldest BERTs have kept.
_OLD = {"gamma": "weight", "beta": "bias"}


class Named(NamedTuple):
    """The tensors of a checkpoint, by the names of a table.

    Attributes:
      tensors: by the name of their row.
      heads: names of those that are left out.
      wrong: for each that does not fit, what is wrong.
    """

    tensors: dict[str, Any]
    heads: list[str]
    wrong: list[str]


class Family(NamedTuple):
    """A model of a checkpoint.

    Attributes:
      module: ours.
      example: arguments that it can be initialized with.
      rows: one for each tensor.
      ignored: patterns (of `fnmatch`) of tensors that say nothing of their own, such as masks.
      heads: patterns of what the module has not, such as a head, and is left out with a warning.
      prefix: what models that wrap this one put before all names; it may be there or not.
      copies: names of tensors that must be equal to others, whose names follow, or stand for them.
    """

    module: nn.Module
    example: tuple[Any, ...]
    rows: list[Row]
    ignored: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    prefix: str = ""
    copies: Mapping[str, str] = MappingProxyType({})

    def shapes(self) -> dict[str, Any]:
        """Return shapes and dtypes of our parameters, by path."""
        variables = jax.eval_shape(self.module.init, jax.random.key(0), *self.example)
        return flatten_dict(variables["params"], sep="/")

    def named(self, tensors: Tensors) -> Named:
        """Return the tensors by the names of the rows, and the names of others."""
        rows = {row.theirs for row in self.rows}
        by_row, heads, wrong = dict[str, Any](), list[str](), list[str]()
        copies = list[tuple[str, Any, str]]()
        for name, x in tensors.items():
            stem, _, leaf = name.rpartition(".")
            new = f"{stem}.{_OLD[leaf]}" if leaf in _OLD else name
            bare = new.removeprefix(self.prefix)
            row = next((n for n in (name, new, bare, self.prefix + new) if n in rows), None)
            if row is not None and row not in by_row:
                by_row[row] = x
            elif row is not None:
                wrong.append(f"surplus {name}")
            elif (whole := self.copies.get(name, self.copies.get(bare))) is not None:
                copies.append((name, x, whole))
            elif any(fnmatch.fnmatchcase(bare, pattern) for pattern in self.heads):
                heads.append(name)
            elif not any(fnmatch.fnmatchcase(bare, pattern) for pattern in self.ignored):
                wrong.append(f"surplus {name}")
        for name, x, other in copies:
            table: Any = by_row.setdefault(other, x)
            if not device_put.equal(x, table):
                wrong.append(f"{name} must be {other}, to which the config ties it, and differs")
        return Named(by_row, heads, sorted(wrong))


def from_tensors(
    family: Family, tensors: Tensors, join: Callable[[list[Any]], Any] = np.concatenate
) -> dict[str, Any]:
    """Return our variables from the tensors of a checkpoint, each in its dtype.

    Args:
      family: the table.
      tensors: by name.
      join: what makes one parameter of several arrays, one after another on the first axis.

    Raises:
      ValueError: one that lists every tensor that is missing, surplus or of another shape.
    """
    named = family.named(tensors)
    present = [row for row in family.rows if row.theirs in named.tensors]
    missing = [f"missing {row.theirs}" for row in family.rows if row.theirs not in named.tensors]
    wrong = named.wrong + missing
    # Shapes take time for each layer, which a file that lacks most of them is not worth.
    params = family.shapes() if 2 * len(present) > len(family.rows) else {}
    arrays = dict[str, list[Any]]()
    for row in present if params else ():
        x, shapes = named.tensors[row.theirs], [row.shape(params[path].shape) for path in row.paths]
        if x.shape != (expected := _shape(row, shapes)):
            wrong.append(f"{row.theirs} must be {list(expected)}, is {list(x.shape)}")
            continue
        for path, part, shape in zip(row.paths, row.apart(x), shapes, strict=True):
            arrays.setdefault(path, []).append(row.axes.ours(part, shape))
    if wrong:
        raise ValueError(
            f"the tensors do not fit the model of this config: {several(wrong)}; take both from "
            f"one checkpoint"
        )
    if named.heads:
        warnings.warn(
            f"left out, as this {type(family.module).__name__} has no place for them: "
            f"{', '.join(sorted(named.heads))}", stacklevel=3,
        )  # fmt: skip
    whole = {path: parts[0] if len(parts) == 1 else join(parts) for path, parts in arrays.items()}
    return {"params": unflatten_dict(whole, sep="/")}


class Stored(NamedTuple):
    """A tensor of a checkpoint that is made when it is asked for, as one array of NumPy.

    Attributes:
      shape: of it.
      dtype: of it.
      make: makes it.
    """

    shape: Shape
    dtype: np.dtype[Any]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """The bytes that it will have."""
        return math.prod(self.shape) * self.dtype.itemsize


def to_tensors(family: Family, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint from our variables: `from_tensors`, read backwards."""
    return {name: x.make() for name, x in stored(family, variables).items()}


def stored(family: Family, variables: Mapping[str, Any]) -> dict[str, Stored]:
    """Return these tensors, each to be made when it is asked for."""
    params = flatten_dict(variables["params"], sep="/")
    differing = {path for row in family.rows for path in row.paths} ^ params.keys()
    if differing:
        raise ValueError(f"the variables are not those of the model: {several(sorted(differing))}")

    def make(row: Row) -> np.ndarray:
        parts = [row.axes.theirs(row.cut(np.asarray(params[path]))) for path in row.paths]
        return np.asarray(row.together(parts), order="C")

    tensors = {}
    for row in family.rows:
        arrays = [params[path] for path in row.paths]
        shape = _shape(row, [row.shape(x.shape) for x in arrays])
        dtype = np.result_type(*(x.dtype for x in arrays))
        tensors[row.theirs] = Stored(shape, dtype, functools.partial(make, row))
    return tensors


def _shape(row: Row, ours: list[Shape]) -> Shape:
    """Return the shape of a tensor, by the shapes of ours."""
    # No memory stands behind these arrays.
    sizes = [*row.axes.theirs(np.broadcast_to(np.False_, ours[0])).shape]
    if len(ours) > 1:
        sizes[-1 if row.alternate else row.split] *= len(ours)
    return (sizes[0] * sizes[1], *sizes[2:]) if row.heads is not None else tuple(sizes)


def when(condition: Any, *rows: Row) -> list[Row]:
    """Return the rows if the condition holds, else none."""
    return list(rows) if condition else []


def each(layers: int | Iterable[int], rows: Iterable[Row]) -> list[Row]:
    """Return the rows of that many layers, or of layers of these numbers, for which {} stands."""
    rows = list(rows)
    return [
        row._replace(theirs=row.theirs.format(i), ours=tuple(x.format(i) for x in row.paths))
        for i in (range(layers) if isinstance(layers, int) else layers)
        for row in rows
    ]


def linear(
    theirs: str, ours: str | tuple[str, ...], bias: bool = True, inputs: int = 1,
    axes: Axes | None = None, split: int = 0, leaves: tuple[str, str] = LEAVES,
) -> list[Row]:  # fmt: skip
    """Return the rows of a PyTorch Linear, or of a kernel and a bias that lie in another way.

    Args:
      theirs: its name.
      ours: the path of our module, or those of several that lie in it one after another.
      bias: whether there is one.
      inputs: how many axes ours has for its inputs.
      axes: how the kernel lies (default: `transposed`).
      split: on which axis of the kernel several lie.
      leaves: what follows the name, of the kernel and of the bias.
    """
    axes = transposed(inputs) if axes is None else axes
    paths = (ours,) if isinstance(ours, str) else ours
    kernels, biases = (tuple(f"{path}/{leaf}" for path in paths) for leaf in ("kernel", "bias"))
    rows = [Row(theirs + leaves[0], kernels, axes, split)]
    return rows + when(bias, Row(theirs + leaves[1], biases, SAME if axes is SAME else FLAT))


def norm(theirs: str, ours: str, bias: bool = True, offset: float = 0.0) -> list[Row]:
    """Return the rows of a norm."""
    scale = Row(f"{theirs}.weight", f"{ours}/scale", plus(offset) if offset else SAME)
    return [scale, *when(bias, Row(f"{theirs}.bias", f"{ours}/bias"))]


def attention(
    theirs: str, ours: str, names: Sequence[str], biases: Sequence[bool] = (True,) * 4,
    kernel: Callable[[int], Axes] | None = transposed, leaves: tuple[str, str] = LEAVES,
) -> list[Row]:  # fmt: skip
    """Return the rows of the projections of queries, keys, values and out, by their names in order.

    Args:
      theirs: what the names begin with, up to a dot; may be empty.
      ours: the path of the layer; may be empty.
      names: one name several times is one tensor, in which they lie one after another.
      biases: which of them have one.
      kernel: how one lies, by how many axes ours has for its inputs; None as ours.
      leaves: see `linear`.
    """
    rows: list[Row] = []
    for name in dict.fromkeys(names):
        members = [i for i, other in enumerate(names) if other == name]
        paths = tuple(f"{ours}/{PROJECTIONS[i]}".removeprefix("/") for i in members)
        axes = SAME if kernel is None else kernel(2 if members == [3] else 1)
        full = f"{theirs}.{name}".removeprefix(".")
        rows += linear(full, paths, biases[members[0]], axes=axes, leaves=leaves)
    return rows
