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
# `attention` needs leaves=("weight", "bias") with these names of torch.nn.MultiheadAttention.
TORCH_HEADS = ("in_proj_", "in_proj_", "in_proj_", "out_proj.")
# The oldest BERT checkpoints have TensorFlow's names of the arrays of a norm.
_OLD_LEAVES = {"gamma": "weight", "beta": "bias"}
# The arguments that initialize a model of tokens.
TOKEN_EXAMPLE = (np.zeros((1, 1), np.int32),)


class Layout(NamedTuple):
    """A conversion of an array to a module's layout, given the shape there, and back."""

    ours: Callable[[Any, Shape], Any]
    theirs: Callable[[Any], Any]


SAME = Layout(lambda x, shape: x.reshape(shape), lambda x: x)
# Heads and features joined to one axis.
FLATTENED = Layout(lambda x, shape: x.reshape(shape), lambda x: x.reshape(-1))


def transposed(inputs: int = 1) -> Layout:
    """Return the layout [out, in] of PyTorch's Linear for a kernel with `inputs` input axes."""
    return Layout(lambda x, shape: x.T.reshape(shape), lambda x: _matrix(x, inputs).T)


def in_out(inputs: int = 1) -> Layout:
    """Return the layout [in, out] of GPT-2's Conv1D for a kernel with `inputs` input axes."""
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
    """Return the layout of an array that is stored minus an offset: Gemma's scales minus 1."""

    def add(x: Any, offset: float) -> Any:
        # NumPy would return float32 for bfloat16.
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
      ours: the path of the parameter, or the paths of several that the tensor concatenates.
      axes: the layout of each parameter.
      split: the tensor's axis on which parameters are concatenated.
      heads: the number of heads if parameters are concatenated in each head. The first axis is then
        split into [heads, -1], and `split` counts both.
      part: the slice (start, stop) of the parameter's first axis, if consecutive rules store it.
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

    def pieces(self, parameters: Iterable[Any]) -> list[Any]:
        """Return each parameter's piece of the tensor, in the tensor's layout."""
        rows = slice(None) if self.part is None else slice(*self.part)
        return [self.axes.theirs(x[rows] if self.part else x) for x in parameters]

    def shapes(self, parameters: Iterable[Shape]) -> tuple[list[Shape], Shape]:
        """Return the shapes of the pieces and of the tensor, given the parameters' shapes."""
        # A broadcast scalar takes no memory.
        pieces = self.pieces(np.broadcast_to(np.False_, shape) for shape in parameters)
        shapes = [x.shape for x in pieces]
        sizes, axis = [*shapes[0]], -1 if self.alternate else self.split
        if len(shapes) > 1:
            sizes[axis] = sum(shape[axis] for shape in shapes)
        if self.heads is not None:
            sizes[:2] = [sizes[0] * sizes[1]]
        return shapes, tuple(sizes)

    def to_ours(self, x: Any, parameters: Sequence[Shape]) -> list[Any]:
        """Split a tensor into parameters of these shapes, or into their slices `part`."""
        if self.heads is not None:
            x = x.reshape(self.heads, -1, *x.shape[1:])
        if self.alternate:
            pieces = [x[..., i :: len(self.paths)] for i in range(len(self.paths))]
        elif len(self.paths) > 1:
            sizes = [shape[self.split] for shape in self.shapes(parameters)[0]]
            pieces = np.split(x, np.cumsum(sizes[:-1]), self.split)
        else:
            pieces = [x]
        if self.part is not None:
            parameters = [(self.part[1] - self.part[0], *shape[1:]) for shape in parameters]
        return [self.axes.ours(*pair) for pair in zip(pieces, parameters, strict=True)]

    def to_theirs(self, parameters: Iterable[np.ndarray]) -> np.ndarray:
        """Join parameters to the tensor."""
        pieces = self.pieces(parameters)
        if self.alternate:
            return np.stack(pieces, -1).reshape(*pieces[0].shape[:-1], -1)
        x = np.concatenate(pieces, self.split) if len(pieces) > 1 else pieces[0]
        return x if self.heads is None else x.reshape(-1, *x.shape[2:])


class Family(NamedTuple):
    """A module and the table of its tensors in a checkpoint.

    Attributes:
      module: the Flax module.
      example: the arguments that initialize it.
      rows: a rule for each tensor.
      ignored: `fnmatch` patterns of tensors without weights, such as constant masks.
      heads: patterns of tensors of other heads, which are left out with a warning.
      prefix: an optional prefix of all names.
      copies: duplicates by name, each with the tensor that it must equal.
      empty: the shapes of tensors of size 0, which are written too.
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
        """Return the module's parameters by path, as shapes and dtypes."""
        variables = jax.eval_shape(self.module.init, jax.random.key(0), *self.example)
        return flatten_dict(variables["params"], sep="/")

    def bare(self, name: str) -> str:
        """Return a tensor's name without the prefix, and with today's name of its leaf."""
        stem, _, leaf = name.rpartition(".")
        name = f"{stem}.{_OLD_LEAVES[leaf]}" if leaf in _OLD_LEAVES else name
        return name.removeprefix(self.prefix)

    def names(self) -> dict[str, str]:
        """Return the names in the table, by the bare names."""
        return {self.bare(row.theirs): row.theirs for row in self.rows}

    def warn_of_heads(self, names: Iterable[str]) -> None:
        """Warn of the heads among these tensors, as they are left out."""
        known = self.names()
        heads = [x for x in names if _fits(self.bare(x), self.heads) and self.bare(x) not in known]
        if heads:
            name, listed = type(self.module).__name__, ", ".join(sorted(heads))
            checks.warn(f"left out, as this {name} has no place for them: {listed}")

    def match(self, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the tensors by their names in the table, and a list of errors."""
        names, matched, errors = self.names(), dict[str, Any](), list[str]()
        copies = list[tuple[str, str]]()
        for name, x in tensors.items():
            bare = self.bare(name)
            if bare in names and names[bare] not in matched:
                matched[names[bare]] = x
            elif bare in self.copies:
                copies.append((name, self.copies[bare]))
            elif bare in names or not _fits(bare, self.heads + self.ignored):
                errors.append(f"surplus {name}")
        for name, original in copies:
            if not device_put.equal(tensors[name], matched.setdefault(original, tensors[name])):
                errors.append(f"{name} must equal {original}, which the config ties it to")
        return matched, sorted(errors)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def from_tensors(
    family: Family, tensors: Mapping[str, Any], join: Callable[[list[Any]], Any] = np.concatenate
) -> dict[str, Any]:
    """Return the module's variables from the arrays of a checkpoint by name.

    `join` concatenates a list of arrays on the first axis.

    Raises:
      ValueError: if tensors are missing, surplus or misshapen. The error lists all of them.
    """
    matched, errors = family.match(tensors)
    present = [row for row in family.rows if row.theirs in matched]
    errors += [f"missing {row.theirs}" for row in family.rows if row.theirs not in matched]
    # Skip shapes if most tensors are missing: tracing takes 0.1 s a layer.
    params = family.shapes() if 2 * len(present) > len(family.rows) else {}
    arrays = dict[str, list[Any]]()
    for row in present if params else ():
        x, shapes = matched[row.theirs], [params[path].shape for path in row.paths]
        if x.shape != (expected := row.shapes(shapes)[1]):
            errors.append(f"{row.theirs} must be {list(expected)}, is {list(x.shape)}")
            continue
        for path, parameter in zip(row.paths, row.to_ours(x, shapes), strict=True):
            arrays.setdefault(path, []).append(parameter)
    if errors:
        raise ValueError(
            f"the tensors do not fit the model of this config: {several(errors)}; take both from "
            f"one checkpoint"
        )
    family.warn_of_heads(tensors)
    joined = {path: parts[0] if len(parts) == 1 else join(parts) for path, parts in arrays.items()}
    return {"params": unflatten_dict(joined, sep="/")}


def to_tensors(family: Family, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint from variables, the inverse of `from_tensors`."""
    return {name: make() for name, (_, make) in stored(family, variables).items()}


def stored(
    family: Family, variables: Mapping[str, Any]
) -> Mapping[str, tuple[jax.ShapeDtypeStruct, Callable[[], np.ndarray]]]:
    """Return each tensor's shape and dtype, and a function that makes it.

    `to_tensors` makes all at once, which takes as much memory again.
    """
    params = trees.parameters_by_path(variables)
    differing = {path for row in family.rows for path in row.paths} ^ params.keys()
    # Single layers have no example.
    for path, x in family.shapes().items() if family.example and not differing else ():
        if params[path].shape != x.shape:
            differing.add(f"{path} ({[*params[path].shape]} in place of {[*x.shape]})")
    if differing:
        raise ValueError(
            f"the variables must be the model's, got a difference in {several(sorted(differing))}; "
            f"give the variables of the module that the config describes"
        )

    def make(row: TensorRule) -> np.ndarray:
        return np.asarray(row.to_theirs(np.asarray(params[x]) for x in row.paths), order="C")

    tensors = {}
    for row in family.rows:
        arrays = [params[path] for path in row.paths]
        dtype = np.result_type(*(x.dtype for x in arrays))
        spec = jax.ShapeDtypeStruct(row.shapes(x.shape for x in arrays)[1], dtype)
        tensors[row.theirs] = (spec, functools.partial(make, row))
    for name, shape in family.empty.items():
        spec = jax.ShapeDtypeStruct(shape, dtype)
        tensors[name] = (spec, functools.partial(np.zeros, shape, dtype))
    return tensors


def when(condition: Any, *rows: TensorRule) -> list[TensorRule]:
    """Return the rules if the condition is true, else an empty list."""
    return list(rows) if condition else []


def per_layer(layers: int | Iterable[int], rows: Iterable[TensorRule]) -> list[TensorRule]:
    """Return the rules of layers, whose number, or each of whose numbers, replaces {}."""
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
    """Return the rules of a linear layer.

    Args:
      theirs: the layer's name in the checkpoint.
      ours: the path of the module, or of several modules that the tensors concatenate.
      bias: True if the layer has a bias.
      inputs: the number of input axes of the module's kernel.
      axes: the kernel's layout (default: PyTorch's, `transposed`).
      split: the axis on which the kernel concatenates modules.
      leaves: the suffixes of the kernel's and the bias' names.
    """
    axes = transposed(inputs) if axes is None else axes
    paths = (ours,) if isinstance(ours, str) else ours
    kernels, biases = (tuple(f"{path}/{leaf}" for path in paths) for leaf in ("kernel", "bias"))
    flat = SAME if axes is SAME else FLATTENED
    kernel = TensorRule(theirs + leaves[0], kernels, axes, split)
    return [kernel, *when(bias, TensorRule(theirs + leaves[1], biases, flat))]


def norm(theirs: str, ours: str, bias: bool = True, offset: float = 0.0) -> list[TensorRule]:
    """Return the rules of a norm, whose scale is stored minus `offset`."""
    axes = plus(offset) if offset else FLATTENED
    scale = TensorRule(f"{theirs}.weight", f"{ours}/scale", axes)
    return [scale, *when(bias, TensorRule(f"{theirs}.bias", f"{ours}/bias"))]


def attention(
    theirs: str, ours: str, names: Sequence[str], biases: Sequence[bool] = (True,) * 4,
    kernel: Callable[[int], Layout] | None = transposed, leaves: tuple[str, str] = LEAVES,
) -> list[TensorRule]:  # fmt: skip
    """Return the rules of the projections of an attention layer.

    Args:
      theirs: the prefix of the names in the checkpoint, or "".
      ours: the path of the layer, or "".
      names: the names of the query, key, value and output projections. Projections with the same
        name are one tensor.
      biases: for each projection, True if it has a bias.
      kernel: a function from the number of input axes to the layout; None for Flax's layout.
      leaves: the suffixes of the kernel's and the bias' names.
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

    `names` are names in the checkpoint, each with the path of a part. A path that ends with "norm"
    is a norm, one that ends with "scale" an array, and all others are linear layers.
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
    """Return the rules of `count` blocks, with the rules of `attention` and of `parts`.

    `theirs` has {} for a block's number. `layers` are the names of its attention layers, each with
    the name of its field.
    """
    block, rows = f"{ours}/layers_{{}}", list[TensorRule]()
    for name, layer in layers.items():
        rows += attention(f"{theirs}.{name}", f"{block}/{layer}", heads, biases)
    return per_layer(count, rows + parts(theirs, block, names, bias))
