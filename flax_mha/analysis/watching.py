"""Models whose attention layers capture values."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax import nnx

from flax_mha import linen
from flax_mha.edits import attention_layers
from flax_mha.kernels import Capture


def watch(model: Any, capture: Capture | None) -> Any:
    """Return a copy of a model whose attention layers capture values, for the same variables.

    Args:
      model: a linen module that holds its attention layers in its fields, as those of
        `flax_mha.models` do; or an nnx module, whose copy shares its variables.
      capture: the values, such as `Capture(("weights",))`; None for none.

    Raises:
      ValueError: if the model holds no attention layer.
    """
    if isinstance(model, nnx.Module):
        copy = nnx.merge(*nnx.split(model))
        layers = attention_layers(copy)
        for _, layer in layers:
            layer.capture = capture
        is_changed = bool(layers)
    else:

        def change(x: Any, path: Any) -> Any:
            return x.clone(capture=capture) if isinstance(x, linen.MultiHeadAttention) else None

        copy = rebuild(model, change)
        is_changed = copy is not model
    if not is_changed:
        raise ValueError(
            f"a model to watch must hold attention layers of flax_mha in its fields, got "
            f"{type(model).__name__}; give the layer it makes `capture` instead"
        )
    return copy


def rebuild(x: Any, change: Callable[[Any, Any], Any], path: tuple[str, ...] = ()) -> Any:
    """Return a linen module with the modules in its fields changed, or itself if none is.

    Args:
      x: the module, or another value of a field.
      change: a function of a module and its path to a new module, or to None, to go on into its
        fields.
      path: the path of x.
    """
    if isinstance(x, tuple | list):
        parts = [rebuild(y, change, (*path[:-1], f"{path[-1]}_{i}")) for i, y in enumerate(x)]
        return type(x)(parts) if any(a is not b for a, b in zip(x, parts, strict=True)) else x
    if not isinstance(x, nn.Module):
        return x
    if (new := change(x, path)) is not None:
        return new
    fields = {
        name: getattr(x, name) for name in x.__dataclass_fields__ if name not in ("parent", "name")
    }
    changed = {
        name: rebuild(value, change, (*path, getattr(value, "name", None) or name))
        for name, value in fields.items()
    }
    changed = {name: value for name, value in changed.items() if value is not fields[name]}
    return x.clone(**changed) if changed else x
