"""Models whose attention layers capture values."""

from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import flax.linen as nn
from flax import nnx

from flax_mha.edits import attention_layers
from flax_mha.interop.contexts import within
from flax_mha.kernels import Capture
from flax_mha.kernels.call.capture import as_capture
from flax_mha.taps.tap import looking

Model = TypeVar("Model", bound=nn.Module | nnx.Module)


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
    return looking(capture=capture or Capture(()))
