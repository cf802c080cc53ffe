"""Attention functions with the signatures of Flax's, ours and a layer's own.

For a model that keeps its layers:

>>> nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=flax_mha.attention_fn)
>>> nnx.MultiHeadAttention(8, 512, attention_fn=flax_mha.attention_fn, rngs=nnx.Rngs(0))
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, PrecisionLike
from jax.ad_checkpoint import checkpoint_name

from flax_mha import masks, sharding
from flax_mha.base import shapes
from flax_mha.base.arguments import check_given
from flax_mha.base.coordinates import Array
from flax_mha.kernels import dot_product_attention
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


def attention_fn(  # noqa: D417
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None,
    mask: masks.MaskLike | None = None, broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None, dropout_rate: float = 0.0, deterministic: bool = False,
    dtype: Dtype | None = None, precision: PrecisionLike = None, module: Any = None,
    force_fp32_for_softmax: bool = False, einsum_dot_general: Function | None = None,
    qk_attn_weights_einsum: Function | None = None,
    attn_weights_value_einsum: Function | None = None, *, is_causal: bool = False, **call: Any,
) -> jax.Array:  # fmt: skip
    """Compute `dot_product_attention`, with the signature that Flax's layers expect.

    `flax_mha.dot_product_attention` describes the arguments that are not here.

    Args:
      query: the queries [*B, T, N, H].
      key: the keys [*B, S, K, H].
      value: the values [*B, S, K, Hv].
      deterministic: True for no dropout.
      dtype: the dtype of the computation (default: promoted from the arrays).
      module: a linen or nnx module that sows the weights, before dropout, as `attention_weights`.
      force_fp32_for_softmax: ignored. The softmax is always in at least float32.
      einsum_dot_general: None; kernels have no einsum to replace.
      qk_attn_weights_einsum: None.
      attn_weights_value_einsum: None.
      is_causal: True to hide later positions.
      **call: other arguments of `dot_product_attention`, such as `kernel` and `scores`.

    Returns:
      out [*B, T, N, Hv].

    Raises:
      ValueError, TypeError: as `dot_product_attention`; if an einsum is given.
    """
    del force_fp32_for_softmax
    einsums = {
        "einsum_dot_general": einsum_dot_general, "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }  # fmt: skip
    check_given("attention_fn", einsums)
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    if not deterministic:
        call |= {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
    result = dot_product_attention(
        query, key, value, bias=bias, broadcast_dropout=broadcast_dropout, precision=precision,
        mask=masks.combine(masks.Causal(), mask) if is_causal else mask,
        return_weights=module is not None, **call,
    )  # fmt: skip
    if module is None:
        return result
    out, weights = result
    module.sow("intermediates", "attention_weights", weights)
    return out


def dot_product_attention_weights(  # noqa: D417
    query: jax.Array, key: jax.Array, bias: jax.Array | None = None,
    mask: masks.MaskLike | None = None, broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None, dropout_rate: float = 0.0, deterministic: bool = False,
    dtype: Dtype | None = None, precision: PrecisionLike = None, module: Any = None,
    force_fp32_for_softmax: bool = False, einsum_dot_general: Function | None = None,
    einsum: Function | None = None, *, is_causal: bool = False, **call: Any,
) -> jax.Array:  # fmt: skip
    """Return the weights of attention, with the signature of the function in Flax.

        weights = dropout(softmax(scores(q·kᵀ·scale) + bias, over the keys that the mask allows))

    A fully masked query has weights of 0. `attention_fn` describes the other arguments.

    Args:
      query: the queries [*B, T, N, H].
      key: the keys [*B, S, K, H].
      einsum: None.
      **call: other arguments of `dot_product_attention`, such as `scores` and `sinks`.

    Returns:
      [*B, N, T, S], in the promoted dtype of query and key.

    Raises:
      ValueError, TypeError: as `dot_product_attention`; if an einsum is given.
    """
    del force_fp32_for_softmax
    einsums = {"einsum_dot_general": einsum_dot_general, "einsum": einsum}
    check_given("dot_product_attention_weights", einsums)
    query, key = promote_dtype(query, key, dtype=dtype)
    call |= {"mask": masks.combine(masks.Causal(), mask) if is_causal else mask, "bias": bias}
    values = jnp.zeros_like(key[..., :1])  # Not used.
    weights: jax.Array = dot_product_attention(
        query, key, values, precision=precision, return_weights=True, **call
    )[1]
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    if deterministic:
        return weights
    spec = bind_call(
        query, key, values, dropout_rng=dropout_rng, dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout,
    )[-1]  # fmt: skip
    return spec.scale_kept(spec.apply_dropout(weights, spec.at(shapes.Dims.of(query, key, values))))


def run_custom(
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
