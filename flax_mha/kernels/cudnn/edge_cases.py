"""cuDNN's attention with defined results for fully masked rows, the lse, and sinks.

With p = exp(scores − lse), cuDNN's backward pass computes d score = p·(dout·v − Σ dout·out) from
the given lse and out. So with a sink, where out′ = out·σ(lse − sink) and
lse′ = log(exp(lse) + exp(sink)), it computes the right gradients from out′ and lse′.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha.base import trees
from flax_mha.kernels.call.spec import name_result
from flax_mha.kernels.cudnn import primitives
from flax_mha.kernels.cudnn.bands import Band
from flax_mha.kernels.cudnn.primitives import CudnnCall
from flax_mha.kernels.xla.softmax import FAR

# An output and its lse.
Result = tuple[jax.Array, jax.Array]
# Replaces −∞ in a bias, for which cuDNN returns NaN. jax.nn uses the same number. If all biases of
# a row are −∞, its lse is below half of this.
MIN_BIAS = -float(2**41)
# The bias of a pair that a mask hides.
HIDDEN = 2 * MIN_BIAS


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    call: CudnnCall, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None,
    sinks: jax.Array | None, band: Band, result: Result | None,
) -> Result:  # fmt: skip
    """Attend within rows.

    q is [rows, T, N, F], k and v are [rows, S, K, F], bias is [rows|1, N|1, T, S], finite or NaN,
    and sinks are float32 [N]. Without mask and bias, every row sees all keys. Given a precomputed
    `result` of these and other keys, without sinks, only its gradients are computed. Returns out
    [rows, T, N, F], and lse [rows, N, T], −∞ for fully masked rows without a sink.
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


@trees.trace_once
def _attend_keys(
    call: CudnnCall, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, band: Band
) -> Result:
    """Attend by cuDNN, without sinks, with an output of 0 and an lse of −∞ for fully masked rows.

    cuDNN's own results for these rows are undefined.
    """
    out, lse = primitives.forward(call, q, k, v, bias, *band.operands())
    lse = lse if band.runs is None else band.runs.lse(lse)
    if band.sees and bias is None:
        return out, lse
    start, end = band.keys(q.shape[1], k.shape[1])
    is_empty = (end <= start)[:, None]
    if bias is not None:
        is_empty = is_empty | (lse < MIN_BIAS / 2)
    is_empty = jnp.broadcast_to(is_empty, lse.shape)
    return _zero_rows(is_empty, out), jnp.where(is_empty, -jnp.inf, lse)


def _zero_rows(where: jax.Array, x: jax.Array) -> jax.Array:
    """Set rows [rows, N, T] of x [rows, T, N, F] to 0."""
    return jnp.where(jnp.swapaxes(where, 1, 2)[..., None], jnp.zeros_like(x), x)


def _add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> Result:
    """Add each head's sink, which has no value, to the softmax."""
    sinks = sinks[None, :, None]
    share = jnp.where(lse == -jnp.inf, 0.0, jax.nn.sigmoid(lse - sinks))
    scaled = out.astype(share.dtype) * jnp.swapaxes(share, 1, 2)[..., None]
    return scaled.astype(out.dtype), jnp.logaddexp(lse, sinks)


def _forward(call: CudnnCall, *primals: Any) -> tuple[Result, tuple[Any, ...]]:
    return _attend(call, *jax.tree.map(lambda x: x.value, primals))


def _backward(call: CudnnCall, residuals: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
    dout, dlse = (
        None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents
    )
    return *_gradients(call, residuals, dout, dlse), None, None


@trees.trace_once
def _gradients(
    call: CudnnCall, residuals: tuple[Any, ...], dout: jax.Array | None, dlse: jax.Array | None
) -> tuple[Any, ...]:
    """Return the gradients of q, k, v, bias and sinks, from the residuals of `_attend`."""
    q, k, v, bias, sinks, band, out, lse = residuals
    is_empty = None if band.sees and bias is None else lse == -jnp.inf
    lse = lse if sinks is None else jnp.logaddexp(lse, sinks[None, :, None])
    if is_empty is not None and dout is not None:
        dout = _zero_rows(is_empty, dout)
    dsinks = None if sinks is None else _sink_gradient(sinks, lse, out, dout, dlse)
    if is_empty is not None:
        lse = jnp.where(is_empty, FAR, lse)
        dlse = None if dlse is None else jnp.where(is_empty, 0, dlse)
    return *_pull(call, (q, k, v, bias), band, lse, out, dout, dlse), dsinks


attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _pull(
    call: CudnnCall, inputs: tuple[Any, ...], band: Band, lse: jax.Array, out: jax.Array,
    dout: jax.Array | None, dlse: jax.Array | None,
) -> Any:  # fmt: skip
    """Return the gradients of q, k, v and bias by cuDNN, with a pass for each cotangent."""
    q, k, v, bias = inputs
    pull = functools.partial(primitives.backward, call)
    operands = (bias, *band.operands(), lse if band.runs is None else band.runs.by_run(lse))
    gradients = jax.tree.map(jnp.zeros_like, (q, k, v, bias if call.learned else None))
    if dout is not None:
        gradients = pull(q, k, v, *operands, out, dout)
    if dlse is not None:
        # cuDNN computes p·(dout·v − dout·out). To get p·dlse, pass values of 1 in one feature,
        # dlse in this feature of dout, and 0 as out.
        one = jnp.zeros_like(v).at[..., 0].set(1)
        as_dout = jnp.zeros_like(out).at[..., 0].set(jnp.swapaxes(dlse, 1, 2).astype(out.dtype))
        dq, dk, _, dbias = pull(q, k, one, *operands, jnp.zeros_like(out), as_dout)
        gradients = jax.tree.map(jnp.add, gradients, (dq, dk, jnp.zeros_like(v), dbias))
    if band.runs is None:
        return gradients
    # cuDNN writes gradients only for tokens of documents.
    dq, *of_keys, dbias = gradients
    sizes = dq.shape[1], k.shape[1]
    (first, last), (start, end) = band.keys(*sizes), band.queries(*sizes)
    dk, dv = (jnp.where((end <= start)[..., None, None], 0, x) for x in of_keys)
    return jnp.where((last <= first)[..., None, None], 0, dq), dk, dv, dbias


def _sink_gradient(
    sinks: jax.Array, lse: jax.Array, out: jax.Array, dout: jax.Array | None,
    dlse: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """Return Σ p·(dlse − dout·out) over each head's queries, because a sink has no value."""
    weight = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(sinks[None, :, None] - lse))
    delta = jnp.zeros_like(lse) if dlse is None else dlse
    if dout is not None:
        delta -= jnp.einsum("btnf,btnf->bnt", dout, out, preferred_element_type=jnp.float32)
    return (weight * delta).sum((0, 2))
