"""The values of each layer, found in a tree of all that a model sowed."""

import re
from typing import Any

import jax
import numpy as np


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
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    leaves = [(path, leaf) for path, leaf in leaves if name in path]
    places = [path.partition(name)[0].removeprefix("intermediates/") for path, _ in leaves]
    layers: dict[str, np.ndarray] = {}
    for place, (path, leaf) in zip(places, leaves, strict=True):
        shape = leaf.shape[-axes:]
        is_scanned = leaf.ndim > axes + 1 and leaf.size == leaf.shape[0] * np.prod(shape)
        if leaf.ndim < axes or (not is_scanned and leaf.size != np.prod(shape)):
            raise ValueError(
                f"weights must be [heads, queries, keys] of one example, got {leaf.shape}; choose "
                f"an example, such as weights[:1]"
            )
        call = f", call {path.rpartition('/')[2]}" if places.count(place) > 1 else ""
        each = np.asarray(leaf, np.float32).reshape(-1, *shape)
        # The index of a scan's step follows `layers` in a stack.
        before, is_in_stack, after = f"/{place}".partition("/layers/")
        for step, values in enumerate(each):
            layer = f"{before}/layers[{step}]/{after}" if is_in_stack else f"{place[:-1]}[{step}]"
            layers[(layer if len(each) > 1 else place).strip("/") + call] = values

    def in_order(item: tuple[str, np.ndarray]) -> list[str | int]:
        # Numbers are compared as numbers, so that `layers_2` is before `layers_10`.
        return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", item[0])]

    return dict(sorted(layers.items(), key=in_order))
