"""A layer's `attention_fn`: a function of Flax's signature in place of the kernels."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, PrecisionLike

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array
from flax_mha.kernels.bind import bind_call
from flax_mha.kernels.normalizers import SOFTMAX
from flax_mha.kernels.stored import dequantize
from flax_mha.masks.base import evaluate

Function = Callable[..., Any]


def run(
    fn: Function,
    q: jax.Array,
    k: Any,
    v: Any,
    *,
    mask: masks.MaskLike | None = None,
    bias: jax.Array | None = None,
    q_positions: Array | None = None,
    kv_positions: Array | None = None,
    precision: PrecisionLike = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = False,
    dtype: Dtype | None = None,
    force_fp32_for_softmax: bool = False,
    module: nn.Module | None = None,
    **refused: Any,
) -> tuple[Any, ...]:
    """Attention by a function of Flax's signature, called as Flax's layer calls it.

    The mask, whatever it is, becomes a table of bools [*B, N|1, T, S]; keys and values of groups
    are repeated to N heads. What the function has no parameter for is left out if that changes
    nothing, and refused otherwise.

    Args:
      fn: the function.
      q: as for `dot_product_attention`, as all up to `broadcast_dropout`.
      k: see there.
      v: see there.
      mask: see there.
      bias: see there.
      q_positions: see there.
      kv_positions: see there.
      precision: see there.
      dropout_rate: see there.
      dropout_rng: see there.
      broadcast_dropout: see there.
      dtype: the layer's.
      force_fp32_for_softmax: the layer's.
      module: the layer, if it is to sow the weights.
      **refused: options that only kernels of `flax_mha` have; must be false.

    Returns:
      (out [*B, T, N, Hv],).

    Raises:
      ValueError: if the function can't do what the call asks for.
    """
    for name, value in refused.items():
        if isinstance(value, jax.Array) or value not in (None, False, (), "auto", SOFTMAX):
            raise ValueError(
                f"{name} needs a kernel of flax_mha, got it with attention_fn, which has no way to "
                f"take it; leave out one of them"
            )
    q, k, v, spec = bind_call(
        q, k, v, mask=mask, q_positions=q_positions, kv_positions=kv_positions
    )
    k, v = dequantize(k), dequantize(v)
    dims = shapes.attention_dims(q, k, v)
    if dims.G > 1:
        k, v = (
            sharding.auto(functools.partial(jnp.repeat, repeats=dims.G, axis=-2), sharding.HEADS, x)
            for x in (k, v)
        )
    table = None
    if spec.mask is not None:
        allowed = evaluate(spec.mask, spec.at(dims))
        table = jnp.broadcast_to(allowed, (*dims.B, allowed.shape[-3], dims.T, dims.S))
    call: dict[str, Any] = {
        "bias": bias, "mask": table, "broadcast_dropout": broadcast_dropout,
        "dropout_rng": dropout_rng, "dropout_rate": dropout_rate, "deterministic": not dropout_rate,
        "dtype": dtype, "precision": precision, "module": module,
        "force_fp32_for_softmax": force_fp32_for_softmax,
        "qk_attn_weights_einsum": None, "attn_weights_value_einsum": None,
    }  # fmt: skip
    of_dropout = ("dropout_rng", "dropout_rate") if dropout_rate else ()
    needed = {"bias", "mask", "module", *of_dropout}
    out = fn(q, k, v, **_taken(fn, call, {name for name in needed if call[name] is not None}))
    if jnp.shape(out) != (*dims.B, dims.T, dims.N, dims.Hv):
        raise ValueError(
            f"attention_fn must give [*B, T, N, Hv] = {(*dims.B, dims.T, dims.N, dims.Hv)}, got "
            f"{checks.describe(out)}; its queries are [*B, T, N, H]"
        )
    return (spec.nan_where_invalid(out),)


def _taken(fn: Function, call: dict[str, Any], needed: set[str]) -> dict[str, Any]:
    """The arguments that a function has parameters for, those it can't do without among them."""
    parameters = inspect.signature(fn).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = set() if anything else needed - parameters.keys()
    if missing:
        raise ValueError(
            f"attention_fn must take {' and '.join(sorted(missing))}, which this call has, got a "
            f"function of {', '.join(parameters)}; give it those parameters"
        )
    named = {name: value for name, value in call.items() if name in parameters}
    # Flax's layer gives nothing to **kwargs: a mask would be dropped in silence.
    return named | {name: call[name] for name in needed}
