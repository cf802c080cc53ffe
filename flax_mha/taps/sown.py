"""The values that a model sowed, by path."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict


def by_path(sown: Any) -> dict[str, Any]:
    """Return sown values by path; of several calls of a module a tuple."""
    tree = nnx.to_pure_dict(sown) if isinstance(sown, nnx.State) else sown
    flat = flatten_dict(tree.get("intermediates", tree))
    return {
        "/".join(map(str, path)): x[0] if isinstance(x, tuple) and len(x) == 1 else x
        for path, x in flat.items()
    }


def named(sown: Any, name: str) -> dict[str, Any]:
    """Return the values of one name by path of the module that sowed them."""
    flat = {path.rpartition("/"): x for path, x in by_path(sown).items()}
    return {module: x for (module, _, last), x in flat.items() if last == name}


def find_weights(tree: Any) -> dict[str, np.ndarray]:
    """Return the weights [N, T, S] of each layer by its path, in the model's order.

    Args:
      tree: the weights of one example, [*B, N, T, S] with every B = 1, or a tree of such arrays,
        such as all `intermediates`, from which `attention_weights` are taken.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if len(leaves) == 1 and "attention_" not in jax.tree_util.keystr(leaves[0][0]):
        tree = {"attention_weights": leaves[0][1]}
    layers = find(tree, "attention_weights", 3)
    if not layers:
        raise ValueError(
            'weights must hold an array "attention_weights", got none; give the layer '
            'capture=Capture(("weights",))'
        )
    return layers


def find(tree: Any, name: str, axes: int) -> dict[str, np.ndarray]:
    """Return sown arrays of one example by the path of their layer, in the model's order.

    With `nn.scan` an array has a leading axis of layers: `layers[0]/attention`, and so on. If a
    module is called several times, its calls are `path, call 0`, and so on.

    Args:
      tree: a tree of arrays.
      name: the name of the arrays, such as "attention_entropy".
      axes: the number of their axes after the batch.
    """
    layers: dict[str, np.ndarray] = {}
    for place, values in (named(tree, name) if isinstance(tree, Mapping) else {}).items():
        calls = values if isinstance(values, tuple) else (values,)
        for call, x in enumerate(calls):
            shape, leading = x.shape[-axes:], x.shape[:-axes]
            batch = leading[1:] or leading
            if x.ndim < axes or any(size != 1 for size in batch):
                raise ValueError(
                    f"weights must be [heads, queries, keys] of one example, got {x.shape}; choose "
                    f"an example, such as weights[:1]"
                )
            each = np.asarray(x, np.float32).reshape(-1, *shape)
            for step, layer in enumerate(each):
                # The index of a scan's step follows `layers` in a stack.
                key, is_in_stack = re.subn(r"\blayers\b", f"layers[{step}]", place, count=1)
                key = key if is_in_stack else f"{place}[{step}]"
                key = key if len(each) > 1 else place
                layers[key + (f", call {call}" if len(calls) > 1 else "")] = layer

    def in_order(item: tuple[str, np.ndarray]) -> list[str | int]:
        # Numbers are compared as numbers, so that `layers_2` is before `layers_10`.
        return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", item[0])]

    return dict(sorted(layers.items(), key=in_order))
