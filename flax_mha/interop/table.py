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
from flax_mha.interop.settings import several
from flax_mha.interop.tensor_rule import FLATTENED as FLATTENED
from flax_mha.interop.tensor_rule import SAME as SAME
from flax_mha.interop.tensor_rule import Layout as Layout
from flax_mha.interop.tensor_rule import TensorRule as TensorRule
from flax_mha.interop.tensor_rule import expert as expert
from flax_mha.interop.tensor_rule import in_out as in_out
from flax_mha.interop.tensor_rule import patches as patches
from flax_mha.interop.tensor_rule import plus as plus
from flax_mha.interop.tensor_rule import transposed as transposed
from flax_mha.interop.tensor_rule import wrapped as wrapped

Tensors: TypeAlias = Mapping[str, Any]


PROJECTIONS = ("query", "key", "value", "out")
# What follows a name in PyTorch, of the kernel and of the bias.
LEAVES = (".weight", ".bias")
# As TensorFlow named the arrays of a norm, which the oldest BERTs have kept.
_OLD = {"gamma": "weight", "beta": "bias"}


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
    rows: list[TensorRule]
    ignored: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    prefix: str = ""
    copies: Mapping[str, str] = MappingProxyType({})

    def shapes(self) -> dict[str, Any]:
        """Return shapes and dtypes of our parameters, by path."""
        variables = jax.eval_shape(self.module.init, jax.random.key(0), *self.example)
        return flatten_dict(variables["params"], sep="/")

    def named(self, tensors: Tensors) -> tuple[dict[str, Any], list[str], list[str]]:
        """Return the tensors by the names of the rows, the names of heads, and what is wrong."""
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
        return by_row, heads, sorted(wrong)


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
    by_row, heads, wrong = family.named(tensors)
    present = [row for row in family.rows if row.theirs in by_row]
    wrong += [f"missing {row.theirs}" for row in family.rows if row.theirs not in by_row]
    # Shapes take time for each layer, which a file that lacks most of them is not worth.
    params = family.shapes() if 2 * len(present) > len(family.rows) else {}
    arrays = dict[str, list[Any]]()
    for row in present if params else ():
        x, shapes = by_row[row.theirs], [row.shape(params[path].shape) for path in row.paths]
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
    if heads:
        warnings.warn(
            f"left out, as this {type(family.module).__name__} has no place for them: "
            f"{', '.join(sorted(heads))}", stacklevel=3,
        )  # fmt: skip
    whole = {path: parts[0] if len(parts) == 1 else join(parts) for path, parts in arrays.items()}
    return {"params": unflatten_dict(whole, sep="/")}


class StoredTensor(NamedTuple):
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


def stored(family: Family, variables: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return these tensors, each to be made when it is asked for."""
    params = flatten_dict(variables["params"], sep="/")
    differing = {path for row in family.rows for path in row.paths} ^ params.keys()
    if differing:
        raise ValueError(f"the variables are not those of the model: {several(sorted(differing))}")

    def make(row: TensorRule) -> np.ndarray:
        parts = [row.axes.theirs(row.cut(np.asarray(params[path]))) for path in row.paths]
        return np.asarray(row.together(parts), order="C")

    tensors = {}
    for row in family.rows:
        arrays = [params[path] for path in row.paths]
        shape = _shape(row, [row.shape(x.shape) for x in arrays])
        dtype = np.result_type(*(x.dtype for x in arrays))
        tensors[row.theirs] = StoredTensor(shape, dtype, functools.partial(make, row))
    return tensors


def _shape(row: TensorRule, ours: list[Shape]) -> Shape:
    """Return the shape of a tensor, by the shapes of ours."""
    # No memory stands behind these arrays.
    sizes = [*row.axes.theirs(np.broadcast_to(np.False_, ours[0])).shape]
    if len(ours) > 1:
        sizes[-1 if row.alternate else row.split] *= len(ours)
    return (sizes[0] * sizes[1], *sizes[2:]) if row.heads is not None else tuple(sizes)


def when(condition: Any, *rows: TensorRule) -> list[TensorRule]:
    """Return the rows if the condition holds, else none."""
    return list(rows) if condition else []


def per_layer(layers: int | Iterable[int], rows: Iterable[TensorRule]) -> list[TensorRule]:
    """Return the rows of that many layers, or of layers of these numbers, for which {} stands."""
    rows = list(rows)
    return [
        row._replace(theirs=row.theirs.format(i), ours=tuple(x.format(i) for x in row.paths))
        for i in (range(layers) if isinstance(layers, int) else layers)
        for row in rows
    ]


def linear(
    theirs: str, ours: str | tuple[str, ...], bias: bool = True, inputs: int = 1,
    axes: Layout | None = None, split: int = 0, leaves: tuple[str, str] = LEAVES,
) -> list[TensorRule]:  # fmt: skip
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
    flat = SAME if axes is SAME else FLATTENED
    kernel = TensorRule(theirs + leaves[0], kernels, axes, split)
    return [kernel, *when(bias, TensorRule(theirs + leaves[1], biases, flat))]


def norm(theirs: str, ours: str, bias: bool = True, offset: float = 0.0) -> list[TensorRule]:
    """Return the rows of a norm."""
    scale = TensorRule(f"{theirs}.weight", f"{ours}/scale", plus(offset) if offset else SAME)
    return [scale, *when(bias, TensorRule(f"{theirs}.bias", f"{ours}/bias"))]


def attention(
    theirs: str, ours: str, names: Sequence[str], biases: Sequence[bool] = (True,) * 4,
    kernel: Callable[[int], Layout] | None = transposed, leaves: tuple[str, str] = LEAVES,
) -> list[TensorRule]:  # fmt: skip
    """Return the rows of the projections of queries, keys, values and out, by their names in order.

    Args:
      theirs: what the names begin with, up to a dot; may be empty.
      ours: the path of the layer; may be empty.
      names: one name several times is one tensor, in which they lie one after another.
      biases: which of them have one.
      kernel: how one lies, by how many axes ours has for its inputs; None as ours.
      leaves: see `linear`.
    """
    rows: list[TensorRule] = []
    for name in dict.fromkeys(names):
        members = [i for i, other in enumerate(names) if other == name]
        paths = tuple(f"{ours}/{PROJECTIONS[i]}".removeprefix("/") for i in members)
        axes = SAME if kernel is None else kernel(2 if members == [3] else 1)
        full = f"{theirs}.{name}".removeprefix(".")
        rows += linear(full, paths, biases[members[0]], axes=axes, leaves=leaves)
    return rows


# The former names of these, for tables outside this package.
Row = TensorRule
Axes = Layout
FLAT, each, straight, one_of_many = FLATTENED, per_layer, in_out, expert
