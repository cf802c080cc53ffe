"""The values that a model sowed, by path."""

import re
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from flax_mha.taps.tap import COLLECTION


def split(model: Any, *args: Any) -> tuple[Any, ...]:
    """Return a model without arrays, and the arguments of a call after the state of an nnx one."""
    return (*nnx.split(model), *args) if isinstance(model, nnx.Module) else (model, *args)


def sown_by(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a call of a model sows, for the model and the arguments that `split` returns."""
    if isinstance(model, nn.Module):
        return model.apply(*args, mutable=nn.DenyList(("params", COLLECTION)), **kwargs)[1]
    state, *inputs = args
    copy = nnx.merge(model, state)
    modules: Any = nnx.iter_modules(copy)
    for path, x in modules:
        if hasattr(x, "edits"):
            x.path = tuple(map(str, path))
    return nnx.capture(lambda m: m(*inputs, **kwargs), nnx.Intermediate)(copy)[1]


def values(sown: Any) -> dict[str, Any]:
    """Return captured tensors by the paths of `names`. Several calls of a module give a tuple.

    >>> _, sown = model.apply(variables, x, mutable="intermediates")
    >>> z = edits.values(sown)["layers_0/attention/attention_z"]

    Args:
      sown: `intermediates`, or all collections of a run; for nnx, the state of intermediates. An
        array is a layer's weights.
    """
    tree = nnx.to_pure_dict(sown) if isinstance(sown, nnx.State) else sown
    tree = tree if isinstance(tree, Mapping) else {"attention_weights": tree}
    flat = flatten_dict(tree.get("intermediates", tree))
    return {
        "/".join(map(str, path)): x[0] if isinstance(x, tuple) and len(x) == 1 else x
        for path, x in flat.items()
    }


def named(sown: Any, name: str) -> dict[str, Any]:
    """Return the values of one name by path of the module that sowed them, all calls stacked."""
    flat = {path.rpartition("/"): x for path, x in values(sown).items()}
    return {
        module: jax.tree.map(lambda *xs: jnp.stack(xs), *x) if isinstance(x, tuple) else x
        for (module, _, last), x in flat.items() if last == name
    }  # fmt: skip


def find_weights(tree: Any) -> dict[str, np.ndarray]:
    """Return the weights [N, T, S] of one example in each layer, as `find` does.

    They are [*B, N, T, S] with every B = 1, or all `attention_weights` in a tree.
    """
    layers = find(tree, "attention_weights", 3)
    if not layers:
        raise ValueError(
            'weights must hold an array "attention_weights", got none; give the layer '
            'capture=Capture(("weights",))'
        )
    return layers


def find(tree: Any, name: str, axes: int) -> dict[str, np.ndarray]:
    """Return sown arrays of one example by the path of their layer, in the model's order.

    With `nn.scan`, or if a module is called several times, an array has a leading axis: its entries
    are `layers[0]/attention`, and so on.

    Args:
      tree: a tree of arrays.
      name: the name of the arrays.
      axes: the number of their axes after the batch.
    """
    layers: dict[str, np.ndarray] = {}
    for place, x in named(tree, name).items():
        leading = x.shape[:-axes]
        if x.ndim < axes or any(size != 1 for size in leading[1:] or leading):
            raise ValueError(
                f"weights must be [heads, queries, keys] of one example, got {x.shape}; choose an "
                f"example, such as weights[:1]"
            )
        each = np.asarray(x, np.float32).reshape(-1, *x.shape[-axes:])
        for step, layer in enumerate(each):
            # The index of a scan's step follows `layers` in a stack.
            key = re.sub(r"\blayers\b|$", rf"\g<0>[{step}]", place, count=1)
            layers[key if len(each) > 1 else place] = layer

    def in_order(item: tuple[str, np.ndarray]) -> list[str | int]:
        # Numbers are compared as numbers, so that `layers_2` is before `layers_10`.
        return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", item[0])]

    return dict(sorted(layers.items(), key=in_order))
