"""Models whose attention layers capture values."""

from typing import Any

import flax.linen as nn
from flax import nnx

from flax_mha import linen
from flax_mha import nnx as nnx_layers
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
        layers = [
            x for _, x in nnx.iter_modules(copy) if isinstance(x, nnx_layers.MultiHeadAttention)
        ]
        for layer in layers:
            layer.capture = capture
        is_changed = bool(layers)
    else:
        copy = _watched(model, capture)
        is_changed = copy is not model
    if not is_changed:
        raise ValueError(
            f"a model to watch must hold attention layers of flax_mha in its fields, got "
            f"{type(model).__name__}; give the layer it makes `capture` instead"
        )
    return copy


def _watched(x: Any, capture: Capture | None) -> Any:
    """Return x with the capture in all attention layers, or x itself if it has none."""
    if isinstance(x, linen.MultiHeadAttention):
        return x.clone(capture=capture)
    if isinstance(x, tuple | list):
        new = type(x)(_watched(y, capture) for y in x)
        return new if any(a is not b for a, b in zip(x, new, strict=True)) else x
    if not isinstance(x, nn.Module):
        return x
    fields = {
        name: getattr(x, name) for name in x.__dataclass_fields__ if name not in ("parent", "name")
    }
    changed = {name: _watched(value, capture) for name, value in fields.items()}
    changed = {name: value for name, value in changed.items() if value is not fields[name]}
    return x.clone(**changed) if changed else x
