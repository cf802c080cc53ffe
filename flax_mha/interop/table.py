"""Tables that map the tensors of a checkpoint to the parameters of a module, and back."""

import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_mha.base import checks, trees
from flax_mha.base.shapes import Shape
from flax_mha.interop.checked_config import several

PROJECTIONS = ("query", "key", "value", "out")
# PyTorch's suffixes of a kernel and of a bias.
LEAVES = (".weight", ".bias")
# Of torch.nn.MultiheadAttention, with leaves=("weight", "bias").
TORCH_HEADS = ("in_proj_", "in_proj_", "in_proj_", "out_proj.")
# The oldest BERTs have TensorFlow's names.
_OLD_LEAVES = {"gamma": "weight", "beta": "bias"}
TOKEN_EXAMPLE = (np.zeros((1, 1), np.int32),)


# Functions of an array to a module's layout, given the shape there, and back.
Layout: TypeAlias = tuple[Callable[[Any, Shape], Any], Callable[[Any], Any]]


def _reshape(x: Any, shape: Shape) -> Any:
    return x.reshape(shape)


SAME = (_reshape, lambda x: x)
# Heads and features joined to one axis.
FLATTENED = (_reshape, lambda x: x.reshape(-1))
# A leading axis of size 1.
WRAPPED = (_reshape, lambda x: x[None])


def transposed(inputs: int = 1) -> Layout:
    """Return the layout [out, in] of PyTorch's Linear for a kernel with `inputs` input axes."""
    return (lambda x, shape: x.T.reshape(shape), lambda x: _matrix(x, inputs).T)


def in_out(inputs: int = 1) -> Layout:
    """Return the layout [in, out] of GPT-2's Conv1D for a kernel with `inputs` input axes."""
    return (_reshape, lambda x: _matrix(x, inputs))


def patches(height: int, width: int) -> Layout:
    """Return the layout [out, channels, height, width] of PyTorch's Conv2d over patches."""

    def theirs(x: Any) -> Any:
        return x.reshape(height, width, -1, x.shape[-1]).transpose(3, 2, 0, 1)

    return (lambda x, shape: x.transpose(2, 3, 1, 0).reshape(shape), theirs)


def plus(offset: float) -> Layout:
    """Return the layout of an array that is stored minus an offset: Gemma's scales minus 1."""

    def add(x: Any, offset: float) -> Any:
        return (x.astype(np.float32) + offset).astype(x.dtype)

    return (lambda x, shape: add(x.reshape(shape), offset), lambda x: add(x, -offset))


def _matrix(x: Any, inputs: int) -> Any:
    return x.reshape(math.prod(x.shape[:inputs]), -1)


class TensorRule(NamedTuple):
    """The rule of one tensor of a checkpoint.

    Attributes:
      theirs: the tensor's name.
      ours: the path of the parameter, or the paths of several that the tensor concatenates.
      axes: the layout of each parameter.
      split: the axis of the concatenation.
      merged: True if the tensor joins that axis with the one before it.
      part: the slice of the parameter's first axis, if several rules store it.
    """

    theirs: str
    ours: str | tuple[str, ...]
    axes: Layout = SAME
    split: int = 0
    merged: bool = False
    part: Any = ...

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the parameters."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def _pieces(self, parameters: Iterable[Any]) -> list[Any]:
        """Return each parameter's piece of the tensor, in the tensor's layout."""
        _, theirs = self.axes
        return [theirs(x[self.part]) for x in parameters]

    def _shapes(self, parameters: Iterable[Shape]) -> tuple[list[int], list[int]]:
        """Return the pieces' sizes on the axis `split`, and the shape of their concatenation."""
        # A broadcast scalar takes no memory.
        pieces = self._pieces(np.broadcast_to(np.False_, shape) for shape in parameters)
        whole = [*pieces[0].shape]
        if len(pieces) == 1:
            return [], whole
        sizes = [x.shape[self.split] for x in pieces]
        whole[self.split] = sum(sizes)
        return sizes, whole

    def shape(self, parameters: Iterable[Shape]) -> Shape:
        """Return the tensor's shape, given the parameters' shapes."""
        _, whole = self._shapes(parameters)
        if self.merged:
            pair = slice(self.split - 1, self.split + 1)
            whole[pair] = [math.prod(whole[pair])]
        return tuple(whole)

    def to_ours(self, x: Any, parameters: Sequence[Shape]) -> list[Any]:
        """Split a tensor into parameters of these shapes, or into their slices `part`."""
        sizes, whole = self._shapes(parameters)
        pieces = np.split(x.reshape(whole), np.cumsum(sizes[:-1]), self.split) if sizes else [x]
        slices = [np.broadcast_to(np.False_, shape)[self.part].shape for shape in parameters]
        return [self.axes[0](*pair) for pair in zip(pieces, slices, strict=True)]

    def to_theirs(self, parameters: Iterable[np.ndarray]) -> np.ndarray:
        """Join parameters to the tensor."""
        parameters = [*parameters]
        pieces = self._pieces(parameters)
        x = np.concatenate(pieces, self.split) if len(pieces) > 1 else pieces[0]
        return x.reshape(self.shape(x.shape for x in parameters))


class Family(NamedTuple):
    """A module and the table of its tensors in a checkpoint.

    Attributes:
      module: the Flax module.
      example: the arguments that initialize it.
      rows: the rules of tensors. Those of parameters that the module lacks don't count.
      ignored: `fnmatch` patterns of tensors without weights, such as constant masks.
      heads: patterns of heads, which are left out with a warning.
      prefix: an optional prefix of all names.
      copies: duplicates by name, each with the tensor that it must equal.
    """

    module: nn.Module
    example: tuple[Any, ...]
    rows: list[TensorRule]
    ignored: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    prefix: str = ""
    copies: Mapping[str, str] = {}

    def shapes(self) -> dict[str, Any]:
        """Return the module's parameters by path, as shapes and dtypes."""
        variables = jax.eval_shape(self.module.init, jax.random.key(0), *self.example)
        return flatten_dict(variables["params"], sep="/")

    def fitted(self, params: Mapping[str, Any]) -> "Family":
        """Return the family without rules of parameters that are not among these paths."""
        rows = [row for row in self.rows if not params.keys().isdisjoint(row.paths)]
        return self._replace(rows=rows)

    def bare(self, name: str) -> str:
        """Return a tensor's name without the prefix, and with today's name of its leaf."""
        stem, _, leaf = name.rpartition(".")
        name = f"{stem}.{_OLD_LEAVES[leaf]}" if leaf in _OLD_LEAVES else name
        return name.removeprefix(self.prefix)

    def warn_of_heads(self, names: Iterable[str]) -> None:
        """Warn of the heads among these tensors, which are left out."""
        known = {self.bare(row.theirs) for row in self.rows}
        heads = [x for x in names if _fits(self.bare(x), self.heads) and self.bare(x) not in known]
        if heads:
            name, listed = type(self.module).__name__, ", ".join(sorted(heads))
            checks.warn(f"left out, as this {name} has no place for them: {listed}")

    def match(self, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the tensors by their names in the table, and a list of errors."""
        names = dict(self.copies) | {self.bare(row.theirs): row.theirs for row in self.rows}
        matched, errors = dict[str, Any](), list[str]()
        for name in sorted(tensors, key=lambda x: self.bare(x) in self.copies):
            x, bare = tensors[name], self.bare(name)
            if bare in names:
                first = matched.setdefault(names[bare], x)
                # Rows, to save memory.
                if x is not first and not (x.shape == first.shape and all(map(_equal, x, first))):
                    errors.append(f"{name} must equal {names[bare]}, which the config ties it to")
            elif not _fits(bare, self.heads + self.ignored):
                errors.append(f"surplus {name}")
        return matched, sorted(errors)


def _equal(x: Any, y: Any) -> bool:
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()


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
    params = family.shapes()
    family = family.fitted(params)
    matched, errors = family.match(tensors)
    arrays, remedy = dict[str, list[Any]](), "take both from one checkpoint"
    for row in family.rows:
        shapes = [params[path].shape for path in row.paths]
        if row.theirs not in matched:
            errors.append(f"missing {row.theirs}")
        elif (x := matched[row.theirs]).shape != (expected := row.shape(shapes)):
            errors.append(f"{row.theirs} must be {list(expected)}, is {list(x.shape)}")
        elif not jnp.issubdtype(x.dtype, jnp.floating):
            errors.append(f"{row.theirs} must have a floating dtype, is {x.dtype}")
            remedy = "multiply codes by their scales, and view bytes |V2 as ml_dtypes.bfloat16"
        else:
            for path, parameter in zip(row.paths, row.to_ours(x, shapes), strict=True):
                arrays.setdefault(path, []).append(parameter)
    filled = {path for row in family.rows for path in row.paths}
    errors += [f"no tensor for {path}" for path in params.keys() - filled]
    if errors:
        raise ValueError(
            f"the tensors do not fit the model of this config: {several(errors)}; {remedy}"
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
    shapes = family.shapes() if family.example else params  # Single layers have no example.
    rows = family.fitted(shapes).rows
    differing = {path for row in rows for path in row.paths} ^ params.keys()
    for path in shapes.keys() & params.keys():
        if params[path].shape != (size := shapes[path].shape):
            differing.add(f"{path} ({[*params[path].shape]} in place of {[*size]})")
    if differing:
        raise ValueError(
            f"the variables must be the model's, got a difference in {several(sorted(differing))}; "
            f"give the variables of the module that the config describes"
        )

    def make(row: TensorRule) -> np.ndarray:
        return np.asarray(row.to_theirs(np.asarray(params[x]) for x in row.paths), order="C")

    tensors = {}
    for row in rows:
        arrays = [params[path] for path in row.paths]
        dtype = np.result_type(*(x.dtype for x in arrays))
        spec = jax.ShapeDtypeStruct(row.shape(x.shape for x in arrays), dtype)
        tensors[row.theirs] = (spec, functools.partial(make, row))
    return tensors


def per_layer(layers: int, rows: Iterable[TensorRule]) -> list[TensorRule]:
    """Return the rules of each layer, whose number replaces {}."""
    rows = list(rows)
    return [
        row._replace(theirs=row.theirs.format(i), ours=tuple(x.format(i) for x in row.paths))
        for i in range(layers)
        for row in rows
    ]


def linear(
    theirs: str,
    ours: str | tuple[str, ...],
    kernel: Callable[[int], Layout] | None = transposed,
    leaves: tuple[str, str] = LEAVES,
) -> list[TensorRule]:
    """Return the rules of a linear layer.

    Args:
      theirs: the layer's name in the checkpoint.
      ours: the path of the module, or of several modules whose outputs the layer concatenates.
      kernel: a function from the number of input axes (2 for a module "out") to the layout; None
        for Flax's layout.
      leaves: the suffixes of the kernel's and the bias' names.
    """
    paths = (ours,) if isinstance(ours, str) else ours
    kernels, biases = (tuple(f"{path}/{leaf}" for path in paths) for leaf in ("kernel", "bias"))
    inputs = 2 if paths[0].rpartition("/")[2] == "out" else 1
    axes, flat = (SAME, SAME) if kernel is None else (kernel(inputs), FLATTENED)
    return [
        TensorRule(theirs + leaves[0], kernels, axes, split=-1 if kernel is in_out else 0),
        TensorRule(theirs + leaves[1], biases, flat),
    ]


def norm(theirs: str, ours: str, offset: float = 0.0) -> list[TensorRule]:
    """Return the rules of a norm, whose scale is stored minus `offset`."""
    scale = TensorRule(f"{theirs}.weight", f"{ours}/scale", plus(offset) if offset else FLATTENED)
    return [scale, TensorRule(f"{theirs}.bias", f"{ours}/bias")]


def attention(
    theirs: str,
    ours: str,
    names: Sequence[str],
    kernel: Callable[[int], Layout] | None = transposed,
    leaves: tuple[str, str] = LEAVES,
) -> list[TensorRule]:
    """Return the rules of the projections of an attention layer.

    Args:
      theirs: the prefix of the names in the checkpoint.
      ours: the path of the layer.
      names: the names of the query, key, value and output projections; equal ones are one tensor.
      kernel: see `linear`, also for `leaves`.
      leaves: the suffixes of names.
    """
    paths = {
        name: tuple(x for x, other in zip(PROJECTIONS, names, strict=False) if other == name)
        for name in names
    }
    return parts(theirs, ours, paths, kernel=kernel, leaves=leaves)


def parts(
    theirs: str,
    ours: str,
    names: Mapping[str, str | Sequence[str]],
    offset: float = 0.0,
    kernel: Callable[[int], Layout] | None = transposed,
    leaves: tuple[str, str] = LEAVES,
) -> list[TensorRule]:
    """Return the rules of the parts of a module.

    `names` are names in the checkpoint, each with the path of a part, or with the paths of linear
    layers that a tensor concatenates. Paths that end with "norm" or "_ln" are norms, with "scale"
    or "sinks" arrays, with "table", "positions" or "embedding" embeddings, others linear layers.
    See `norm` for `offset`, and `linear` for `kernel` and `leaves`.
    """
    rows: list[TensorRule] = []
    for name, part in names.items():
        full = f"{theirs}.{name}".removeprefix(".")
        one, *_ = paths = tuple(
            f"{ours}/{x}".removeprefix("/") for x in ((part,) if isinstance(part, str) else part)
        )
        if one.endswith(("norm", "_ln")):
            rows += norm(full, one, offset)
        elif one.endswith(("scale", "sinks")):
            rows.append(TensorRule(full, one))
        elif one.endswith(("table", "positions", "embedding")):
            rows.append(TensorRule(f"{full}.weight", f"{one}/embedding"))
        else:
            rows += linear(full, paths, kernel, leaves)
    return rows
