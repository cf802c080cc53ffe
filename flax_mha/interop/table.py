"""Tables that map the tensors of a checkpoint to the parameters of a module, and back."""

import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_mha.base import checks, trees
from flax_mha.base.shapes import Shape
from flax_mha.interop import device_put
from flax_mha.interop.checked_config import several

PROJECTIONS = ("query", "key", "value", "out")
# PyTorch's suffixes of a kernel and of a bias.
LEAVES = (".weight", ".bias")
# The projections of torch.nn.MultiheadAttention, which needs leaves=("weight", "bias").
TORCH_HEADS = ("in_proj_", "in_proj_", "in_proj_", "out_proj.")
# TensorFlow's names for the arrays of a norm, which the oldest BERT checkpoints still have.
_OLD_LEAVES = {"gamma": "weight", "beta": "bias"}
# The arguments that initialize a model of tokens.
TOKEN_EXAMPLE = (np.zeros((1, 1), np.int32),)


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


def _modern(name: str) -> str:
    """Return a tensor's name with today's name of its leaf."""
    stem, _, leaf = name.rpartition(".")
    return f"{stem}.{_OLD_LEAVES[leaf]}" if leaf in _OLD_LEAVES else name


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

    def part_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes in the checkpoint of parameters with these shapes."""
        # A broadcast scalar takes no memory.
        return [self.axes.theirs(np.broadcast_to(np.False_, shape)).shape for shape in shapes]

    def split_up(self, x: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Split a tensor into arrays, one for each path, given the parameters' shapes."""
        if self.heads is not None:
            x = x.reshape(self.heads, -1, *x.shape[1:])
        if self.alternate:
            return [x[..., i :: len(self.paths)] for i in range(len(self.paths))]
        sizes = [shape[self.split] for shape in self.part_shapes(shapes)[:-1]]
        return np.split(x, np.cumsum(sizes), self.split) if sizes else [x]

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """Join arrays, one for each path, to the tensor."""
        if self.alternate:
            return np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)
        x = np.concatenate(parts, self.split) if len(parts) > 1 else parts[0]
        return x if self.heads is None else x.reshape(-1, *x.shape[2:])

    def cut(self, x: np.ndarray) -> np.ndarray:
        """Return the slice `part` of a parameter."""
        return x if self.part is None else x[slice(*self.part)]


class Family(NamedTuple):
    """A module and the table of its tensors in a checkpoint.

    Attributes:
      module: the Flax module.
      example: arguments to initialize the module with.
      rows: the table, a rule for each tensor.
      ignored: `fnmatch` patterns of tensors without weights, such as constant masks.
      heads: patterns of tensors that have no place in the module, such as a head's. They are left
        out with a warning.
      prefix: an optional prefix of all names, which models that wrap this one add.
      copies: duplicates by name, each with the name of the tensor that it must equal.
      empty: the shapes of tensors of size 0 by name, which are written too.
    """

    module: nn.Module
    example: tuple[Any, ...]
    rows: list[TensorRule]
    ignored: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    prefix: str = ""
    copies: Mapping[str, str] = MappingProxyType({})
    empty: Mapping[str, Shape] = MappingProxyType({})

    def shapes(self) -> dict[str, Any]:
        """Return the shapes and dtypes of the module's parameters, by path."""
        variables = jax.eval_shape(self.module.init, jax.random.key(0), *self.example)
        return flatten_dict(variables["params"], sep="/")

    def names(self, theirs: Iterable[str]) -> dict[str, str]:
        """Return the names in the table of those tensors of a checkpoint that are in it."""
        known, found = {row.theirs for row in self.rows}, dict[str, str]()
        for name in theirs:
            new = _modern(name)
            for each in (name, new, self.bare(name), self.prefix + new):
                if each in known:
                    found.setdefault(name, each)
        return found

    def bare(self, name: str) -> str:
        """Return a tensor's name without the prefix."""
        return _modern(name).removeprefix(self.prefix)

    def is_head(self, name: str) -> bool:
        """Return True if a tensor has no place in the module, and is left out."""
        return any(fnmatch.fnmatchcase(self.bare(name), pattern) for pattern in self.heads)

    def warn_of(self, heads: Iterable[str]) -> None:
        """Warn of tensors that are left out, if there are any."""
        if listed := ", ".join(sorted(heads)):
            name = type(self.module).__name__
            checks.warn(f"left out, as this {name} has no place for them: {listed}")

    def match(self, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
        """Return the tensors by their names in the table, the names of heads, and the errors."""
        names = self.names(tensors)
        matched, heads, errors = dict[str, Any](), list[str](), list[str]()
        copies = list[tuple[str, Any, str]]()
        for name, x in tensors.items():
            match, bare = names.get(name), self.bare(name)
            if match is not None and match not in matched:
                matched[match] = x
            elif match is not None:
                errors.append(f"surplus {name}")
            elif (original := self.copies.get(name, self.copies.get(bare))) is not None:
                copies.append((name, x, original))
            elif self.is_head(name):
                heads.append(name)
            elif not any(fnmatch.fnmatchcase(bare, pattern) for pattern in self.ignored):
                errors.append(f"surplus {name}")
        for name, x, original in copies:
            array: Any = matched.setdefault(original, x)
            if not device_put.equal(x, array):
                errors.append(f"{name} must equal {original}, which the config ties it to")
        return matched, heads, sorted(errors)


def from_tensors(
    family: Family, tensors: Mapping[str, Any], join: Callable[[list[Any]], Any] = np.concatenate
) -> dict[str, Any]:
    """Return the module's variables from the tensors of a checkpoint, in the tensors' dtypes.

    Args:
      family: the module and its table.
      tensors: the checkpoint's arrays by name.
      join: the function that concatenates a list of arrays on the first axis.

    Raises:
      ValueError: if tensors are missing, surplus or of another shape; the error lists all of them.
    """
    matched, heads, errors = family.match(tensors)
    present = [row for row in family.rows if row.theirs in matched]
    errors += [f"missing {row.theirs}" for row in family.rows if row.theirs not in matched]
    # Tracing the module for its shapes is slow, so skip it for a file that lacks most tensors.
    params = family.shapes() if 2 * len(present) > len(family.rows) else {}
    arrays = dict[str, list[Any]]()
    for row in present if params else ():
        x, shapes = matched[row.theirs], [row.shape(params[path].shape) for path in row.paths]
        if x.shape != (expected := _tensor_shape(row, shapes)):
            errors.append(f"{row.theirs} must be {list(expected)}, is {list(x.shape)}")
            continue
        for path, part, shape in zip(row.paths, row.split_up(x, shapes), shapes, strict=True):
            arrays.setdefault(path, []).append(row.axes.ours(part, shape))
    if errors:
        raise ValueError(
            f"the tensors do not fit the model of this config: {several(errors)}; take both from "
            f"one checkpoint"
        )
    family.warn_of(heads)
    joined = {path: parts[0] if len(parts) == 1 else join(parts) for path, parts in arrays.items()}
    return {"params": unflatten_dict(joined, sep="/")}


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint that is computed on demand.

    Attributes:
      shape: the tensor's shape.
      dtype: the tensor's dtype.
      make: a function that returns the tensor as a NumPy array.
    """

    shape: Shape
    dtype: np.dtype[Any]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def to_tensors(family: Family, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint from variables, the inverse of `from_tensors`."""
    return {name: x.make() for name, x in stored(family, variables).items()}


def stored(family: Family, variables: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint as `to_tensors` does, but compute each on demand."""
    params = trees.parameters_by_path(variables)
    differing = {path for row in family.rows for path in row.paths} ^ params.keys()
    # Layers of other libraries are made from their parameters, without an example.
    for path, x in family.shapes().items() if family.example and not differing else ():
        if params[path].shape != x.shape:
            differing.add(f"{path} ({[*params[path].shape]} in place of {[*x.shape]})")
    if differing:
        raise ValueError(
            f"the variables must be the model's, got a difference in {several(sorted(differing))}; "
            f"give the variables of the module that the config describes"
        )

    def make(row: TensorRule) -> np.ndarray:
        parts = [row.axes.theirs(row.cut(np.asarray(params[path]))) for path in row.paths]
        return np.asarray(row.join(parts), order="C")

    tensors = {}
    for row in family.rows:
        arrays = [params[path] for path in row.paths]
        shape = _tensor_shape(row, [row.shape(x.shape) for x in arrays])
        dtype = np.result_type(*(x.dtype for x in arrays))
        tensors[row.theirs] = StoredTensor(shape, dtype, functools.partial(make, row))
    for name, shape in family.empty.items():
        tensors[name] = StoredTensor(shape, dtype, functools.partial(np.zeros, shape, dtype))
    return tensors


def _tensor_shape(row: TensorRule, shapes: list[Shape]) -> Shape:
    """Return the shape of a tensor that holds parameters of these shapes."""
    parts = row.part_shapes(shapes)
    sizes, axis = [*parts[0]], -1 if row.alternate else row.split
    if len(shapes) > 1:
        sizes[axis] = sum(part[axis] for part in parts)
    return (sizes[0] * sizes[1], *sizes[2:]) if row.heads is not None else tuple(sizes)


def when(condition: Any, *rows: TensorRule) -> list[TensorRule]:
    """Return the rules if the condition is true, else an empty list."""
    return list(rows) if condition else []


def per_layer(layers: int | Iterable[int], rows: Iterable[TensorRule]) -> list[TensorRule]:
    """Return the rules for a number of layers, or for layers of given numbers, in place of {}."""
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
    """Return the rules of the kernel and the bias of a linear layer.

    Args:
      theirs: the layer's name in the checkpoint.
      ours: the path of the module, or of several modules that the tensors concatenate.
      bias: True if the layer has a bias.
      inputs: the number of input axes of the module's kernel.
      axes: the kernel's layout (default: `transposed`, PyTorch's).
      split: the axis on which the kernel concatenates several modules.
      leaves: the suffixes of the names of the kernel and of the bias.
    """
    axes = transposed(inputs) if axes is None else axes
    paths = (ours,) if isinstance(ours, str) else ours
    kernels, biases = (tuple(f"{path}/{leaf}" for path in paths) for leaf in ("kernel", "bias"))
    flat = SAME if axes is SAME else FLATTENED
    kernel = TensorRule(theirs + leaves[0], kernels, axes, split)
    return [kernel, *when(bias, TensorRule(theirs + leaves[1], biases, flat))]


def norm(theirs: str, ours: str, bias: bool = True, offset: float = 0.0) -> list[TensorRule]:
    """Return the rules of a norm.

    Args:
      theirs: the norm's name in the checkpoint.
      ours: the path of the module.
      bias: True if the norm has a bias.
      offset: a number that is subtracted from the scale in the checkpoint.
    """
    axes = plus(offset) if offset else FLATTENED
    scale = TensorRule(f"{theirs}.weight", f"{ours}/scale", axes)
    return [scale, *when(bias, TensorRule(f"{theirs}.bias", f"{ours}/bias"))]


def attention(
    theirs: str, ours: str, names: Sequence[str], biases: Sequence[bool] = (True,) * 4,
    kernel: Callable[[int], Layout] | None = transposed, leaves: tuple[str, str] = LEAVES,
) -> list[TensorRule]:  # fmt: skip
    """Return the rules of the projections of an attention layer.

    Args:
      theirs: the prefix of the names in the checkpoint, without its dot; may be empty.
      ours: the path of the layer; may be empty.
      names: the names of the query, key, value and output projections. A name that is repeated is
        one tensor that concatenates these projections.
      biases: for each projection, True if it has a bias.
      kernel: a function from the number of input axes to a kernel's layout; None for Flax's layout.
      leaves: the suffixes of the names of the kernel and of the bias.
    """
    rows: list[TensorRule] = []
    for name in dict.fromkeys(names):
        indices = [i for i, other in enumerate(names) if other == name]
        paths = tuple(f"{ours}/{PROJECTIONS[i]}".removeprefix("/") for i in indices)
        axes = SAME if kernel is None else kernel(2 if indices == [3] else 1)
        full = f"{theirs}.{name}".removeprefix(".")
        rows += linear(full, paths, biases[indices[0]], axes=axes, leaves=leaves)
    return rows


def parts(theirs: str, ours: str, names: Mapping[str, str], bias: bool = True) -> list[TensorRule]:
    """Return the rules of the norms and linear layers of a module.

    Args:
      theirs: the prefix of the names in the checkpoint, without its dot; may be empty.
      ours: the path of the module; may be empty.
      names: the names in the checkpoint, each with the path of a part. A path that ends with
        "norm" is a norm, one that ends with "scale" an array; all others are linear layers.
      bias: True if all have biases.
    """
    rows: list[TensorRule] = []
    for name, part in names.items():
        pair = (f"{theirs}.{name}".removeprefix("."), f"{ours}/{part}".removeprefix("/"))
        make = norm if part.endswith("norm") else linear
        rows += [TensorRule(*pair)] if part.endswith("scale") else make(*pair, bias)
    return rows


def stack(
    count: int, theirs: str, ours: str, layers: Mapping[str, str], heads: Sequence[str],
    names: Mapping[str, str], biases: Sequence[bool] = (True,) * 4, bias: bool = True,
) -> list[TensorRule]:  # fmt: skip
    """Return the rules of `count` blocks with the rules of `attention` and of `parts`.

    The name `theirs` has {} for a block's number; `layers` are the names of attention layers in it,
    each with the name of its field.
    """
    block, rows = f"{ours}/layers_{{}}", list[TensorRule]()
    for name, layer in layers.items():
        rows += attention(f"{theirs}.{name}", f"{block}/{layer}", heads, biases)
    return per_layer(count, rows + parts(theirs, block, names, bias))
