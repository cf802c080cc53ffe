"""A layer's `attention_fn`: a function of Flax's signature in place of the kernels."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from flax_mha import masks, sharding
from flax_mha.base import shapes
from flax_mha.base.coordinates import Array
from flax_mha.kernels.call.bind import bind_call
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.stored import dequantize
from flax_mha.masks.algebra import TracedNumbers, evaluate

Function = Callable[..., Any]

# Arguments of Flax's function, besides the mask.
_OPTIONS = (
    "bias", "broadcast_dropout", "dropout_rng", "dropout_rate", "dtype", "precision", "module",
    "force_fp32_for_softmax",
)  # fmt: skip


def run(
    fn: Function, q: jax.Array, k: Any, v: Any, *, mask: masks.MaskLike | None = None,
    q_positions: Array | None = None, kv_positions: Array | None = None, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute (out,) by a function, called as Flax's layer calls its `attention_fn`.

    The mask becomes an array of bools [*B, N|1, T, S], and keys and values are repeated to N heads.
    Options that change nothing are left out if the function has no parameter for them.
    """
    call = {name: options.pop(name, None) for name in _OPTIONS}
    for name, value in options.items():
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
    rate = call["dropout_rate"] or 0.0
    call |= {
        "mask": table, "dropout_rate": rate, "deterministic": not rate,
        "broadcast_dropout": bool(call["broadcast_dropout"]),
    }  # fmt: skip
    of_dropout = ("dropout_rng", "dropout_rate") if rate else ()
    needed = {"bias", "mask", "module", *of_dropout}
    # A partial function can hold `bias` and `module`: Flax's layer never passes the first, and the
    # second only to sow. Nothing else goes to **kwargs, where a mask would be dropped in silence.
    names = inspect.signature(fn).parameters.keys() & call.keys() - {"bias", "module"}
    names |= {name for name in needed if call[name] is not None}
    out = fn(q, k, v, **{name: call[name] for name in names})
    if isinstance(spec.mask, TracedNumbers):
        of_queries = jnp.swapaxes(spec.mask.others().any(-1, keepdims=True), -3, -2)
        factor = jnp.where(of_queries, jnp.nan, 1.0).astype(out.dtype)
        out = out * sharding.like(jnp.broadcast_to(factor, out.shape), out)
    return (checkpoint_name(out, "z"),)
