"""Models without some of their attention heads."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import flax.linen as nn
import numpy as np
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_mha import linen, masks
from flax_mha.analysis.selection import Kept, keep
from flax_mha.base import checks
from flax_mha.edits import attention_layers
from flax_mha.interop.contexts import within
from flax_mha.layer.parameters import ArrayEntry, LinearEntry, Table
from flax_mha.models.stacks import Stack
from flax_mha.scores import as_scores, learned
from flax_mha.taps.contexts import looking

Path: TypeAlias = tuple[str, ...]


def prune(model: Any, *args: Any, repeat_kv: bool = False) -> Any:
    """Return a model without some attention heads, and its variables.

    `prune(linen_model, variables, heads, *inputs)` returns a module and its variables, and
    `prune(nnx_model, heads)` a new module. Outputs are those of a `head_mask` of 0 for these heads.
    Keys and values that no query head reads any more are removed too.

    Args:
      model: a linen or nnx module. A pruned stack has a block for each layer, or each of a step.
      *args: the arguments above. `heads` are the indices to remove by path of the layer, such as
        `{"layers_0/attention": (1, 3)}`; the path of a bare layer is "". Layers under `scan` have
        one path: give one tuple for all, or a dict of as many heads for each layer, such as
        `{"layers/attention": {0: (1,), 1: (3,)}}`. Give inputs to find, by tracing a call, layers
        that are made in `setup` or `@nn.compact`, and those of `interop.swap`.
      repeat_kv: True to repeat key/value heads that would be shared by unequal numbers of heads.

    Raises:
      ValueError: if a path or a head is unknown, or no smaller model has these outputs.
      TypeError: if heads are not indices.
    """
    is_nnx = isinstance(model, nnx.Module)
    heads, *inputs = args if is_nnx else args[1:]
    if not isinstance(heads, Mapping):
        raise TypeError(
            f"heads must be a dict of indices by path, got {checks.describe(heads)}; give "
            f"{{'layers_0/attention': (1, 3)}}, say, or {{'': (1, 3)}} for a bare layer"
        )
    removed = {tuple(filter(None, path.split("/"))): x for path, x in heads.items()}
    if is_nnx:
        return _prune_nnx(model, removed, repeat_kv)
    return _prune_linen(model, args[0], removed, inputs, repeat_kv)


def _prune_linen(
    model: nn.Module, variables: Mapping[str, Any], removed: Mapping[Path, Any],
    inputs: Sequence[Any], repeat_kv: bool,
) -> tuple[nn.Module, dict[str, Any]]:  # fmt: skip
    """Return a linen model and its variables without the removed heads."""
    params = flatten_dict(variables["params"])
    kept: dict[Path, Kept] = {}

    def smaller(layer: Any, path: Path) -> dict[str, Any]:
        """Return the new fields of a layer, and change its parameters."""
        N, own = layer.num_heads, _under(path, params)
        table = layer.table(2 * N, 2 * N, 2 * N)
        fields, own, kept[path] = _without(path, layer, table, own, removed[path], repeat_kv)
        params.update({(*path, *name): x for name, x in own.items()})
        return fields

    def change(x: Any, path: Path) -> Any:
        if isinstance(x, Stack):
            return _stack(x, path, params, kept, change)
        if not isinstance(x, linen.MultiHeadAttention):
            return _change_fields(x, path, change)
        if path in removed:
            return x.clone(**smaller(x, path))
        N, K = x.num_heads, x.num_kv_heads or x.num_heads
        kept[path] = Kept("", [np.arange(N).reshape(K, -1)], N, K, 1, N)
        return x

    made = dict(attention_layers(model, variables, *inputs)) if inputs else {}
    model = change(model, ())
    in_calls = {path: made[path] for path in removed if path in made and path not in kept}
    _check_paths(removed, {**kept, **made})
    if in_calls:
        fields = {path: smaller(layer, path) for path, layer in in_calls.items()}
        model = within(model, _in_calls, functools.partial(_replace, fields))
    for name in variables.keys() - {"params"}:
        if any(_under(path, flatten_dict(variables[name])) for path in removed):
            raise ValueError(f"variables must have no {name!r} of pruned layers; leave it out")
    return model, {**variables, "params": unflatten_dict(params)}


def _change_fields(x: Any, path: Path, change: Callable[[Any, Path], Any]) -> Any:
    """Return a linen module, or a value of a field, with the modules in its fields changed."""
    if isinstance(x, tuple | list):
        parts = [change(y, (*path[:-1], f"{path[-1]}_{i}")) for i, y in enumerate(x)]
        return type(x)(parts) if any(a is not b for a, b in zip(x, parts, strict=True)) else x
    if not isinstance(x, nn.Module):
        return x
    fields = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    changed = {
        name: change(value, (*path, getattr(value, "name", None) or name))
        for name, value in fields.items() if name not in ("parent", "name")
    }  # fmt: skip
    changed = {name: value for name, value in changed.items() if value is not fields[name]}
    return x.clone(**changed) if changed else x


def _in_calls(cls: Any, replace: Any) -> AbstractContextManager[None]:
    """Return the context of a model whose calls make layers, which are replaced."""
    del cls
    return looking(at_layer=replace)


def _replace(fields: Mapping[Path, Mapping[str, Any]], layer: Any) -> Any:
    """Return a layer with the fields that a pruned model has at its path."""
    return layer.clone(parent=layer.scope, **fields[layer.path]) if layer.path in fields else layer


def _stack(
    stack: Any, path: Path, params: dict[Path, Any], kept: Mapping[Path, Kept],
    change: Callable[[Any, Path], Any],
) -> Any:  # fmt: skip
    """Return a stack with its blocks changed, and change the parameters of its scores."""
    places, owner = stack.places, "/".join(path) or "the stack"
    old = {name: stack.blocks[block] for name, block, _ in places}
    new = {name: change(x, (*path, *name)) for name, x in old.items()}
    if all(new[name] is old[name] for name in old):
        return stack
    is_scanned = {step is not None for *_, step in places}
    if len(is_scanned) > 1:
        raise ValueError(
            f"the layers of {owner} must fill the steps of its scan to lose heads, got "
            f"{len(places)} in steps of {len(stack.blocks)}; unstack the layers, and set "
            f"scan=False"
        )
    names = [name for name, *_ in places]
    is_smaller = [new[name].attention is not old[name].attention for name in names]
    if any(is_smaller[i] for i in stack.kv_from or () if i is not None):
        raise ValueError(
            f"layers of {owner} must keep the keys and values that others read (kv_from); "
            f"remove heads from layers that share none"
        )
    block, scores = tuple(new.values()), stack.scores
    if any(is_smaller):
        layers = [kept[(*path, *name, "attention")] for name in names]
        rows = [row for layer in layers for row in layer.rows]
        heads = dataclasses.replace(layers[0], owner=owner, rows=rows)
        for name, axes in _score_axes(scores).items():
            if "heads" in axes:
                at = (*path, *name)
                params[at] = heads.shared(name[0]).take(params[at], axes)
        scores = heads.select(as_scores(scores))
    return stack.clone(
        block=block if len(block) > 1 else block[0], scan=True in is_scanned, scores=scores
    )


def _without(
    path: Path, layer: Any, table: Table, arrays: Mapping[Path, Any], removed: Any, repeat_kv: bool
) -> tuple[dict[str, Any], dict[Path, Any], Kept]:
    """Return the new fields of a layer, its parameters, and the heads that it keeps.

    Only the names of axes in the table of parameters are used, not the sizes.
    """
    owner, query = "/".join(path) or "the layer", ("query", "kernel")
    axes = _score_axes(layer.scores)
    for name, entry in table.items():
        if isinstance(entry, LinearEntry):
            axes[name, "kernel"], axes[name, "bias"] = entry.names, entry.names[len(entry.inputs) :]
        elif isinstance(entry, ArrayEntry):
            axes[name,] = entry.names
    missing = [name for name, *leaf in axes if leaf == ["kernel"] and (name, *leaf) not in arrays]
    unknown = ["/".join(x) for x in arrays if x not in axes and x[0] not in table]
    _check_layer(owner, layer, missing, unknown)
    shapes = {name: np.shape(meta.unbox(x)) for name, x in arrays.items()}
    # The first kernel with an axis of features has those of inputs_q.
    D = next(shapes[x][-len(names)] for x, names in axes.items() if names[:1] == ("embed",))
    N, K, H, _ = layer.sizes(D)
    at = len(shapes[query]) - len(axes[query])
    layers, count = shapes[query][:at], shapes[query][at + axes[query].index("heads")]
    rows = keep(owner, removed, N, K, layers, repeat_kv)
    heads = Kept(owner, rows, N, K, H, count, layers)
    fields = {
        "num_heads": rows[0].size, "num_kv_heads": layer.num_kv_heads and len(rows[0]),
        "head_dim": H, "qkv_features": None, "scores": heads.select(as_scores(layer.scores)),
        "mask": None if layer.mask is None else heads.select(masks.as_mask(layer.mask)),
    }  # fmt: skip
    return fields, {name: heads.take(x, axes.get(name, ())) for name, x in arrays.items()}, heads


def _check_layer(owner: str, layer: Any, missing: Sequence[str], unknown: Sequence[str]) -> None:
    """Check that a layer can lose heads."""
    kind, heads = type(layer).__qualname__, layer.capture and layer.capture.heads
    for is_wrong, rule in (
        (layer.mixes_heads, f"not mix its heads, as {kind} does"),
        (missing, f"have parameters for {missing}, got none: it reads those of another layer"),
        (unknown, f"have the parameters of its class alone, got {unknown} too: merge them"),
        (not layer.project_out, "have project_out=True, or its output would have fewer features"),
        (heads, f"capture all heads, got {heads}, which would have other numbers"),
    ):
        if is_wrong:
            raise ValueError(f"a layer that loses heads must {rule}; keep all heads of {owner}")


def _score_axes(scores: Any) -> dict[Path, Sequence[str | None]]:
    """Return the logical names of the axes of the parameters of scores, by path."""
    axes: dict[Path, Sequence[str | None]] = {}

    def make(name: str, shape: Any, names: Any, *_: Any) -> Any:
        axes[name,] = names

    learned(scores, 1, 1, make)
    return axes


def _check_paths(heads: Mapping[Path, Any], layers: Iterable[Path]) -> None:
    if unknown := ["/".join(path) for path in heads if path not in layers]:
        remedy = checks.nearest(unknown[0], map("/".join, layers))
        raise ValueError(
            f"heads must be of attention layers in the model's fields, got {unknown}; for "
            f"{unknown[0]!r} {remedy}, or for layers made in a call give its inputs too, as in "
            f"prune(model, variables, heads, x)"
        )


def _under(path: Path, flat: Mapping[Path, Any]) -> dict[Path, Any]:
    """Return the part of a flat tree below a path."""
    return {name[len(path) :]: x for name, x in flat.items() if name[: len(path)] == path}


def _prune_nnx(model: Any, heads: Mapping[Path, Any], repeat_kv: bool) -> Any:
    """Return a copy of an nnx model without the heads."""
    model = nnx.clone(model)
    layers = dict(attention_layers(model))
    _check_paths(heads, layers)
    for path, removed in heads.items():
        layer = layers[path]
        if layer.kv is not None or layer.edits is not None:
            raise ValueError(
                f"{'/'.join(path) or 'the layer'} must have no cache and no edits, got some; set "
                f"kv and edits to None"
            )
        own, settings = nnx.to_pure_dict(nnx.state(layer, nnx.Param)), layer.settings
        table = settings.table(layer.in_features, layer.in_kv_features, layer.in_kv_features)
        fields, new, _ = _without(path, settings, table, flatten_dict(own), removed, repeat_kv)
        nnx.update(layer, nnx.State(unflatten_dict(new)))
        fields["qkv_features"] = fields["num_heads"] * fields["head_dim"]
        layer.mask, layer.scores = fields.pop("mask"), fields.pop("scores")
        layer.config = dataclasses.replace(layer.config, **fields)
        for name, entry in table.items():
            if isinstance(entry, LinearEntry):
                shape, at = new[name, "kernel"].shape[-len(entry.names) :], len(entry.inputs)
                projection = getattr(layer, name)
                projection.in_features, projection.out_features = shape[:at], shape[at:]
    return model
