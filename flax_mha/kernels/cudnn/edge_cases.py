"""cuDNN's attention with defined results for fully masked rows, the lse, and sinks.

With p = exp(scores − lse), cuDNN's backward pass computes d score = p·(dout·v − Σ dout·out). So it
is right for a sink if it reads out′ = out·σ(lse − sink) and lse′ = log(exp(lse) + exp(sink)).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha.kernels.call.spec import name_result
from flax_mha.kernels.cudnn import primitives
from flax_mha.kernels.cudnn.bands import Band
from flax_mha.kernels.cudnn.primitives import CudnnCall

# An output and its lse.
Result = tuple[jax.Array, jax.Array]
# Replaces −∞ in a bias, for which cuDNN returns NaN. jax.nn uses the same number. If all biases of
# a row are −∞, its lse is below half of this.
MIN_BIAS = -float(2**41)
# The bias of a pair that a mask hides.
HIDDEN = 2 * MIN_BIAS
# An lse that makes all weights of a row 0 in the backward pass, also those of a bias.
_FAR = 1e30


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    call: CudnnCall, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None,
    sinks: jax.Array | None, band: Band, result: Result | None,
) -> Result:  # fmt: skip
    """Return out [rows, T, N, F] and lse [rows, N, T], −∞ for fully masked rows without a sink.

    q is [rows, T, N, F], k and v are [rows, S, K, F], bias is [rows|1, N|1, T, S], finite or NaN,
    and sinks are float32 [N]. If a `result` of these and other keys is given, without sinks, only
    its gradients are computed.
    """
    return _attend(call, q, k, v, bias, sinks, band, result)[0]


def _attend(
    call: CudnnCall, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None,
    sinks: jax.Array | None, band: Band, result: Result | None,
) -> tuple[Result, tuple[Any, ...]]:  # fmt: skip
    """Return the result, and the residuals of its gradients.

    These are the inputs, out with sinks, and lse without sinks, −∞ for fully masked rows.
    """
    out, lse = result or name_result(*_attend_keys(call, q, k, v, bias, band))
    result = (out, lse) if sinks is None else _add_sinks(out, lse, sinks)
    return result, (q, k, v, bias, sinks, band, result[0], lse)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _attend_keys(
    call: CudnnCall, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, band: Band
) -> Result:
    """Attend by cuDNN, without sinks, with an output of 0 and an lse of −∞ for fully masked rows.

    cuDNN's own results for these rows are undefined.
    """
    out, lse = primitives.forward(call, q, k, v, bias, *band.operands())
    lse = lse if band.runs is None else band.runs.lse(lse)
    if not band.may_be_empty and bias is None:
        return out, lse
    is_empty = band.empty(q.shape[1], k.shape[1])[:, None]
    if bias is not None:
        is_empty = is_empty | (lse < MIN_BIAS / 2)
    by_query = jnp.swapaxes(jnp.broadcast_to(is_empty, lse.shape), 1, 2)[..., None]
    return jnp.where(by_query, jnp.zeros_like(out), out), jnp.where(is_empty, -jnp.inf, lse)


def _add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> Result:
    """Add each head's sink, which has no value, to the softmax."""
    sinks = sinks[None, :, None]
    share = jnp.where(lse == -jnp.inf, 0.0, jax.nn.sigmoid(lse - sinks))
    scaled = out.astype(share.dtype) * jnp.swapaxes(share, 1, 2)[..., None]
    return scaled.astype(out.dtype), jnp.logaddexp(lse, sinks)


def _forward(call: CudnnCall, *primals: Any) -> tuple[Result, tuple[Any, ...]]:
    return _attend(call, *jax.tree.map(lambda x: x.value, primals))


def _backward(call: CudnnCall, residuals: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
    out = residuals[-2]
    dout, dlse = (
        None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents
    )
    return (
        *_gradients(call, residuals, jnp.zeros_like(out) if dout is None else dout, dlse),
        None,
        None,
    )


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _gradients(
    call: CudnnCall, residuals: tuple[Any, ...], dout: jax.Array, dlse: jax.Array | None
) -> tuple[Any, ...]:
    """Return the gradients of q, k, v, bias and sinks, from the residuals of `_attend`.

    The lse's cotangent takes a second pass, and is None if the lse is not read.
    """
    q, k, v, bias, sinks, band, out, lse = residuals
    total, dsinks = lse, None
    if sinks is not None:
        total = jnp.logaddexp(lse, sinks[None, :, None])
        dsinks = _sink_gradient(sinks, total, out, dout, dlse)
    if band.may_be_empty or bias is not None:
        total = jnp.where(lse == -jnp.inf, _FAR, total)
    total = total if band.runs is None else band.runs.by_run(total)
    pull = functools.partial(primitives.backward, call)
    operands = bias, *band.operands(), total
    dq, dk, dv, dbias = pull(q, k, v, *operands, out, dout)
    if dlse is not None:
        # cuDNN computes p·(dout·v − dout·out). To get p·dlse, pass values of 1 in one feature,
        # dlse in this feature of dout, and 0 as out.
        one = jnp.zeros_like(v).at[..., 0].set(1)
        as_dout = jnp.zeros_like(out).at[..., 0].set(jnp.swapaxes(dlse, 1, 2).astype(out.dtype))
        more_dq, more_dk, _, more = pull(q, k, one, *operands, jnp.zeros_like(out), as_dout)
        dq, dk = dq + more_dq, dk + more_dk
        dbias = None if dbias is None else dbias + more
    if band.runs is not None and not band.full:
        # cuDNN writes gradients only for the tokens of a run that are within the lengths.
        limits = (dq, band.q), (dk, band.k), (dv, band.k)
        dq, dk, dv = (
            jnp.where((jnp.arange(x.shape[1])[None] < limit[:, None])[..., None, None], x, 0)
            for x, limit in limits
        )
    return dq, dk, dv, dbias, dsinks


attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _sink_gradient(
    sinks: jax.Array, lse: jax.Array, out: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> jax.Array:
    """Return Σ p·(dlse − dout·out) over each head's queries, because a sink has no value."""
    weight = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(sinks[None, :, None] - lse))
    delta = -jnp.einsum("btnf,btnf->bnt", dout, out, preferred_element_type=jnp.float32)
    return (weight * (delta if dlse is None else delta + dlse)).sum((0, 2))
