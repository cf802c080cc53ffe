"""Changed copies of models: without some attention heads, or whose layers capture values."""

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_mha import linen, masks, scores
from flax_mha.base import checks
from flax_mha.base.coordinates import is_user_defined
from flax_mha.edits import attention_layers
from flax_mha.interop.contexts import within
from flax_mha.kernels import Capture
from flax_mha.kernels.call.capture import as_capture
from flax_mha.layer.parameters import ArrayEntry, LinearEntry
from flax_mha.models.stacks import Stack
from flax_mha.nnx import Projection
from flax_mha.scores import as_scores, learned
from flax_mha.taps.tap import capturing

Model = TypeVar("Model", bound=nn.Module | nnx.Module)

# The axis of heads, counted from the end, in the arrays of masks and scores.
_AXES = {
    masks.Dense: -3, masks.BlockSparse: -3, scores.Bias: -3, scores.Alibi: -1,
    scores.RelativeBias: -2, scores.TransformerXL: -2,
}  # fmt: skip


def prune(model: Any, *args: Any, repeat_kv: bool = False) -> Any:
    """Return a model without some attention heads, with the outputs of a `head_mask` of 0 for them.

    `prune(linen_model, variables, heads)` returns a module and its variables, and
    `prune(nnx_model, heads)` a new module, without caches. Keys and values that no query head reads
    are removed too.

    Args:
      model: an nnx module, or a linen module with its layers in fields. In a stack that loses heads
        layers share nothing: no scan, block or scores.
      *args: the arguments above. `heads` are the indices to remove by path of the layer, such as
        `{"layers_0/attention": (1, 3)}`, with or without scan; the path of a bare layer is "".
      repeat_kv: True to repeat key/value heads that would be shared by unequal numbers of heads.

    Raises:
      ValueError: if a path is unknown, or no smaller model has these outputs.
      IndexError: if there is no such head.
    """
    *variables, removed = args
    run: Any = _prune_nnx if isinstance(model, nnx.Module) else _prune_linen
    return run(model, *variables, removed, repeat_kv)


def _prune_linen(
    model: nn.Module, variables: Mapping[str, Any], removed: Mapping[str, Any], repeat_kv: bool
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a linen model and its variables without the removed heads."""
    params = flatten_dict(variables["params"], sep="/")
    layers: list[str] = []

    def change(x: Any, path: str) -> Any:
        """Return a linen module, or a value of a field, with its layers changed."""
        if type(x) in (tuple, list):
            return type(x)(change(y, f"{path}_{i}") for i, y in enumerate(x))
        if not isinstance(x, nn.Module):
            return x
        prefix = path and f"{path}/"
        if isinstance(x, linen.MultiHeadAttention):
            layers.append(path)
            if path not in removed:
                return x
            fields, own = _without(path, x, _under(prefix, params), removed[path], repeat_kv)
            params.update({prefix + name: x for name, x in own.items()})
            return x.clone(**fields)
        is_stack = isinstance(x, Stack) and any(name.startswith(prefix) for name in removed)
        x = _unstack(x, prefix, params) if is_stack else x
        fields = {}
        for name in [field.name for field in dataclasses.fields(x)]:
            value = getattr(x, name)
            part = "layers" if is_stack and name == "block" else getattr(value, "name", None)
            if name not in ("parent", "name"):
                fields[name] = change(value, prefix + (part or name))
        return x.clone(**fields)

    model = change(model, "")
    _check_paths(removed, layers)
    return model, {**variables, "params": unflatten_dict(params, sep="/")}


def _unstack(stack: Any, prefix: str, params: dict[str, Any]) -> Any:
    """Return a stack whose layers share nothing, and change its parameters."""
    if stack.kv_from:
        raise ValueError(
            f"layers of {prefix or 'the stack'} must share no keys to lose heads, got kv_from="
            f"{stack.kv_from}; keep their heads"
        )
    shared = {name: params.pop(prefix + name) for name in _score_axes(stack.scores)}
    scanned = {name: params.pop(name) for name in [*params] if name.startswith(f"{prefix}layers/")}
    blocks = []
    for i, (path, block_index, step) in enumerate(stack.places):
        block, at = stack.blocks[block_index], f"{prefix}layers_{i}/"
        for name, x in _under(prefix + "/".join((*path, "")), scanned).items():
            x = jax.tree.map(operator.itemgetter(step), x)
            params[at + name] = meta.remove_axis(x, 0, {nn.PARTITION_NAME: "layers"})
        own = as_scores(block.attention.scores)
        attention = block.attention.clone(scores=(*own, *as_scores(stack.scores)))
        names = [name for name in _score_axes(attention.scores) if name not in _score_axes(own)]
        params |= {f"{at}attention/{x}": y for x, y in zip(names, shared.values(), strict=True)}
        blocks.append(block.clone(attention=attention))
    return stack.clone(block=tuple(blocks), scan=False, scores=())


def _without(
    path: str, layer: Any, arrays: Mapping[str, Any], removed: Any, repeat_kv: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the new fields of a layer, and its parameters."""
    axes = _score_axes(layer.scores)
    features = 2 * layer.num_heads  # Only the names of the table's axes are used, not the sizes.
    table = layer.table(features, features, features)
    for name, entry in table.items():
        if isinstance(entry, LinearEntry):
            axes[f"{name}/kernel"] = entry.names
            axes[f"{name}/bias"] = entry.names[len(entry.inputs) :]
        elif isinstance(entry, ArrayEntry):
            axes[name] = entry.names
    needed, given = ({name.partition("/")[0] for name in names} for names in (axes, arrays))
    has_own = needed <= given <= {*needed, *table}
    captures_some = layer.capture and layer.capture.heads
    if layer.mixes_heads or captures_some or not layer.project_out or not has_own:
        raise ValueError(
            f"a layer that loses heads must not mix them nor capture some of them, and must have "
            f"project_out=True and all parameters of its class and no others, got a "
            f"{type(layer).__qualname__} with {sorted(given)}; keep all heads of {path!r}"
        )
    # The first kernel with an axis of features has those of inputs_q.
    first, names = next((x, names) for x, names in axes.items() if names[:1] == ("embed",))
    N, K, H, _ = layer.sizes(np.shape(meta.unbox(arrays[first]))[-len(names)])
    rows = _rows(path, removed, N, K, repeat_kv)
    kv_heads, in_group = np.divmod(rows, N // K)

    def indices(size: int, name: str = "heads") -> Any:
        """Return the indices to keep of r·K key/value heads, or of the r·N heads that read them."""
        if name == "kv_heads":
            return np.arange(size).reshape(K, -1)[kv_heads[:, 0]].ravel()
        groups = np.arange(size).reshape(K, -1, N // K)[kv_heads[:, 0]]
        return np.take_along_axis(groups, in_group[:, None], 2).ravel()

    def smaller(x: Any, names: Sequence[str | None]) -> Any:
        for axis, name in enumerate(names, -len(names)):
            if name in ("heads", "kv_heads"):
                x = _take(x, axis, indices(np.shape(meta.unbox(x))[axis], name))
        return x

    kept = indices(layer.score_heads)
    fields = {
        "num_heads": rows.size, "num_kv_heads": layer.num_kv_heads and len(rows), "head_dim": H,
        "qkv_features": None, "scores": _select(as_scores(layer.scores), kept, layer),
        "mask": _select(masks.combine(layer.mask), kept, layer),
    }  # fmt: skip
    return fields, {name: smaller(x, axes.get(name, ())) for name, x in arrays.items()}


def _rows(path: str, removed: Any, N: int, K: int, repeat_kv: bool) -> np.ndarray:
    """Return the query heads to keep, [K', G'], a row for each key/value head or repeat of one."""
    kept = np.delete(np.arange(N), list(removed))
    counts = {*np.bincount(kept // (N // K)).tolist()} - {0}
    if not counts or (len(counts) > 1 and not repeat_kv):
        raise ValueError(
            f"key/value heads of {path!r} must keep as many query heads each, or none, got "
            f"{sorted(counts)}; keep a head, and give repeat_kv=True to repeat keys and values"
        )
    return kept.reshape(-1, math.gcd(*counts))


def _select(tree: Any, index: np.ndarray, layer: Any) -> Any:
    """Return masks and scores for some heads of a layer."""

    def select(x: Any) -> Any:
        # Features of TransformerXL are by default those of all heads.
        is_unknown = isinstance(x, masks.PerHead) or getattr(x, "features", True) is None
        if is_user_defined(x) or is_unknown:
            raise ValueError(
                f"a layer that loses heads must have masks and scores whose heads are known, got "
                f"{type(x).__name__}; give arrays, such as masks.Dense, or keep all heads"
            )
        if isinstance(x, scores.Alibi) and x.slopes is None:
            x = x.replace(slopes=scores.alibi_slopes(layer.score_heads))
        axis = _AXES.get(type(x))
        return x if axis is None else _take(x, axis, index)

    def is_leaf(x: Any) -> bool:
        is_joined = isinstance(x, masks.And | masks.Or | masks.Not)
        return isinstance(x, masks.Mask | scores.ScoreMod) and not is_joined

    return jax.tree.map(select, tree, is_leaf=is_leaf)


def _take(tree: Any, axis: int, index: np.ndarray) -> Any:
    """Return entries of arrays along an axis, counted from the end. An axis of size 1 stays."""

    def take(x: Any) -> Any:
        if np.ndim(x) < -axis or np.shape(x)[axis] == 1:
            return x
        # NumPy arrays stay static.
        return (np if isinstance(x, np.ndarray) else jnp).take(x, index, axis)

    return jax.tree.map(take, tree)


def _score_axes(scores: Any) -> dict[str, Any]:
    """Return the logical names of the axes of the parameters of scores."""
    axes: dict[str, Any] = {}

    def make(name: str, shape: Any, names: Any, *_: Any) -> Any:
        axes[name] = names

    learned(scores, 1, 1, make)
    return axes


def _check_paths(removed: Mapping[str, Any], layers: Iterable[str]) -> None:
    for path in removed.keys() - {*layers}:
        raise ValueError(
            f"heads must be of attention layers in the model's fields, got {path!r}; "
            f"{checks.nearest(path, layers)}"
        )


def _under(prefix: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a flat tree below a path."""
    return {name.removeprefix(prefix): x for name, x in flat.items() if name.startswith(prefix)}


def _prune_nnx(model: Any, removed: Mapping[str, Any], repeat_kv: bool) -> Any:
    """Return a copy of an nnx model without the heads."""
    model = nnx.clone(model)
    layers = {"/".join(path): layer for path, layer in attention_layers(model)}
    _check_paths(removed, layers)
    for path, heads in removed.items():
        layer = layers[path]
        own = flatten_dict(nnx.to_pure_dict(nnx.state(layer, nnx.Param)), sep="/")
        fields, new = _without(path, layer.settings, own, heads, repeat_kv)
        nnx.update(layer, nnx.State(unflatten_dict(new, sep="/")))
        fields["qkv_features"] = fields["num_heads"] * fields["head_dim"]
        layer.kv, layer.mask, layer.scores = None, fields.pop("mask"), fields.pop("scores")
        layer.config = dataclasses.replace(layer.config, **fields)
        for name, projection in vars(layer).items():
            if isinstance(projection, Projection):
                shape, at = new[f"{name}/kernel"].shape, -len(projection.out_features)
                projection.in_features = shape[at - len(projection.in_features) : at]
                projection.out_features = shape[at:]
    return model


def watch(model: Model, capture: Capture | None) -> Model:
    """Return a copy of a model whose attention layers capture values, for the same variables.

    These are all layers of flax_mha that the model calls, wherever a linen model makes them.

    Args:
      model: a linen module; or an nnx module, whose copy shares its variables.
      capture: the values, such as `Capture(("weights",))`; None for none.

    Raises:
      ValueError: if an nnx model holds no attention layer.
    """
    capture = as_capture(capture, in_layer=True)
    if isinstance(model, nn.Module):
        return cast(Model, within(model, _watched, capture))
    copy = nnx.merge(*nnx.split(model))
    layers = attention_layers(copy)
    for _, layer in layers:
        layer.capture = capture
    if not layers:
        raise ValueError(
            f"a model to watch must hold attention layers of flax_mha, got {type(model).__name__}; "
            f"swap those of Flax first, by interop.swap"
        )
    return cast(Model, copy)


def _watched(cls: Any, capture: Capture | None) -> AbstractContextManager[None]:
    """Return the context of a call that captures values."""
    del cls
    return capturing(capture or Capture(()))
