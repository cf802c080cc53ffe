"""Models whose attention layers capture values."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import flax.linen as nn
from flax import nnx

from flax_mha.base import checks
from flax_mha.edits import attention_layers
from flax_mha.interop.contexts import within
from flax_mha.kernels import Capture
from flax_mha.kernels.call.capture import as_capture
from flax_mha.taps.contexts import WATCHED, current, looking

Model = TypeVar("Model", bound=nn.Module | nnx.Module)


def watch(model: Model, capture: Capture | None) -> Model:
    """Return a copy of a model whose attention layers capture values, for the same variables.

    These are all layers of flax_mha that a linen model calls, wherever they are made: in fields,
    `setup` or `@nn.compact`, and those of `interop.swap`. A call without any layer warns.

    Args:
      model: a linen module; or an nnx module, whose copy shares its variables.
      capture: the values, such as `Capture(("weights",))`; None for none.

    Raises:
      ValueError: if an nnx model holds no attention layer.
      TypeError: if the model is not a module.
    """
    capture = as_capture(capture, in_layer=True)
    if isinstance(model, nn.Module):
        return cast(Model, within(model, _watched, capture))
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"model must be a module of linen or nnx, got {checks.describe(model)}; give Model()"
        )
    copy = nnx.merge(*nnx.split(model))
    layers: list[Any] = [layer for _, layer in attention_layers(copy)]
    for layer in layers:
        layer.capture = capture
    others = [x for _, x in nnx.iter_modules(copy) if not any(x is layer for layer in layers)]
    for node in others:
        for name, value in [*vars(node).items()]:
            if isinstance(value, nn.Module):  # For example in `nnx.bridge.ToNNX`.
                setattr(node, name, watch(value, capture))
                layers.append(value)
    if not layers:
        raise ValueError(
            f"a model to watch must hold attention layers of flax_mha, got {type(model).__name__}; "
            f"swap those of Flax first, by interop.swap"
        )
    return cast(Model, copy)


@contextlib.contextmanager
def _watched(cls: Any, capture: Capture | None) -> Iterator[None]:
    """Let a call capture values, and warn if neither it nor an earlier call runs a layer."""
    is_inner = current().watched is cls
    with looking(capture=Capture(()) if capture is None else capture, watched=cls):
        yield
    if not is_inner and cls not in WATCHED:
        checks.warn(
            f"a watched {cls.__name__} has called no attention layer of flax_mha, so nothing is "
            f"captured; swap those of Flax first, by interop.swap"
        )
