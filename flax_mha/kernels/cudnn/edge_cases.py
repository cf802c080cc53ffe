"""cuDNN's attention with defined results for fully masked rows, NaN, the lse, and sinks.

With p = exp(scores − lse), cuDNN's backward pass computes d score = p·(dout·v − Σ dout·out) from
the given lse and out. So with a sink, where out′ = out·σ(lse − sink) and
lse′ = log(exp(lse) + exp(sink)), it computes the right gradients from out′ and lse′.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha.base import trees
from flax_mha.kernels.call.spec import name_result
from flax_mha.kernels.cudnn import primitives
from flax_mha.kernels.cudnn.bands import Band
from flax_mha.kernels.cudnn.primitives import CudnnCall
from flax_mha.kernels.xla.softmax import FAR, finite, isolate_if, lost_queries

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
    and sinks are float32 [N]. Without mask and bias, every row sees all keys, and NaN spreads by
    itself. Given a precomputed `result` of these and other keys, without sinks, only its gradients
    are computed. Returns out [rows, T, N, F], and lse [rows, N, T], −∞ for fully masked rows
    without a sink.
    """
    if call.masked and q.size < k.size:
        # For few queries, the output is read, not all keys.
        attend_keys = functools.partial(_attend_then_check, call)
        return _attend(attend_keys, None, q, k, v, bias, sinks, band, result)[0]
    # A band hides NaN of queries and keys from the output. A weight of 0 does not hide that of
    # values, nor a bias that of keys.
    found = _holds_nan(*(q, k, v) if call.hides else (v,)) if call.masked else None
    attend_keys = functools.partial(_attend_checked, call, found)
    return _attend(attend_keys, found, q, k, v, bias, sinks, band, result)[0]


def _holds_nan(*arrays: jax.Array) -> jax.Array:
    """Return True if an array holds a value that is not finite.

    A reduction is two kernels, where a matmul takes four. Arrays of one shape share them.
    """
    by_shape = dict[tuple[int, ...], Any]()
    for x in arrays:
        by_shape[x.shape] = by_shape.get(x.shape, True) & jnp.isfinite(x)
    return functools.reduce(jnp.logical_or, (~x.all() for x in by_shape.values()))


def _attend(
    attend_keys: Callable[..., Result], found: jax.Array | None, q: jax.Array, k: jax.Array,
    v: jax.Array, bias: jax.Array | None, sinks: jax.Array | None, band: Band,
    result: Result | None,
) -> tuple[Result, tuple[Any, ...]]:  # fmt: skip
    """Return the result, and the residuals of its gradients.

    These are the inputs, out with sinks, lse without sinks, and whether NaN was found, None without
    a mask. The lse is −∞ for fully masked rows, and NaN for rows that see NaN.
    """
    out, lse = result or name_result(*attend_keys(q, k, v, bias, band))
    result = (out, lse) if sinks is None else _add_sinks(out, lse, sinks)
    return result, (q, k, v, bias, sinks, band, result[0], lse, found)


@trees.trace_once
def _attend_checked(call: CudnnCall, found: jax.Array | None, *inputs: Any) -> Result:
    """Attend by cuDNN, with NaN for the rows that see NaN, if it was `found`, and for no others.

    `found` is None for a call without a mask, in which NaN spreads by itself.
    """
    attend = functools.partial(_run, call, *inputs)
    isolate = functools.partial(_isolate, call, *inputs)
    # A branch, because a repair of the result would copy it.
    result = attend() if found is None else isolate_if(found, isolate, attend)
    # After the branch, so that XLA joins this pass with the next operation on the output.
    return _define_empty(result, *inputs)


@trees.trace_once
def _attend_then_check(call: CudnnCall, *inputs: Any) -> Result:
    """Attend as `_attend_checked`, but look for NaN in the output: not enough for gradients."""
    # First, because cuDNN may return NaN for fully masked rows.
    result = _define_empty(_run(call, *inputs), *inputs)

    def isolate() -> Result:
        return _define_empty(_isolate(call, *inputs), *inputs)

    return isolate_if(_holds_nan(result[0]), isolate, lambda: result)


def _isolate(
    call: CudnnCall, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, band: Band
) -> Result:
    """Attend without NaN, which would meet weights of 0, and put it back into rows that see it.

    The results of fully masked rows are undefined.
    """
    out, lse = _run(call, finite(q), finite(k), finite(v), bias, band)
    lse = jnp.where(_nan_rows(call, q, k, v, bias, band), jnp.nan, lse)
    return _set_nan(out, jnp.isnan(jnp.swapaxes(lse, 1, 2))), lse


def _run(
    call: CudnnCall, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, band: Band
) -> Result:
    """Attend by cuDNN. The results of fully masked rows are undefined."""
    out, lse = primitives.forward(call, q, k, v, bias, *band.operands())
    return out, lse if band.runs is None else band.runs.lse(lse)


def _define_empty(result: Result, *inputs: Any) -> Result:
    """Set the output of fully masked rows to 0, and their lse to −∞."""
    q, k, _, bias, band = inputs
    if band.sees and bias is None:
        return result
    out, lse = result
    start, end = band.keys(q.shape[1], k.shape[1])
    is_empty = (end <= start)[:, None]
    if bias is not None:
        is_empty = is_empty | (lse < MIN_BIAS / 2)
    is_empty = jnp.broadcast_to(is_empty, lse.shape)
    by_query = jnp.swapaxes(is_empty, 1, 2)[..., None]
    return jnp.where(by_query, jnp.zeros_like(out), out), jnp.where(is_empty, -jnp.inf, lse)


def _nan_rows(
    call: CudnnCall, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, band: Band
) -> jax.Array:
    """Return True for queries that see a value that is not finite, bool [rows, N, T]."""
    bad_q, bad_k, bad_v = (~jnp.isfinite(x).all(-1) for x in (q, k, v))
    bad_keys = jnp.repeat(bad_k | bad_v, q.shape[2] // k.shape[2], 2)
    of_queries, of_keys = (jnp.swapaxes(x, 1, 2) for x in (bad_q, bad_keys))
    seen = _seen(call, bias, band, q.shape[1], k.shape[1])
    return (seen & (of_queries[..., None] | of_keys[:, :, None])).any(-1)


def _seen(call: CudnnCall, bias: Any, band: Band, T: int, S: int) -> jax.Array:
    """Return the pairs that neither the band nor the bias hides, bool [rows|1, N|1, T, S].

    XLA computes them in the reduction that reads them, so they take no memory.
    """
    j = jnp.arange(S, dtype=jnp.int32)[None, None, None]
    start, end = (x[:, None, :, None] for x in band.keys(T, S))
    seen = (j >= start) & (j < end)
    return seen & ~(bias < (MIN_BIAS + HIDDEN) / 2) if call.hides else seen


def _add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> Result:
    """Add each head's sink, which has no value, to the softmax."""
    sinks = sinks[None, :, None]
    share = jnp.where(lse == -jnp.inf, 0.0, jax.nn.sigmoid(lse - sinks))
    scaled = out.astype(share.dtype) * jnp.swapaxes(share, 1, 2)[..., None]
    return scaled.astype(out.dtype), jnp.logaddexp(lse, sinks)


def _forward(call: CudnnCall, *primals: Any) -> tuple[Result, tuple[Any, ...]]:
    q, k, v, *others = jax.tree.map(lambda x: x.value, primals)
    found = _holds_nan(*(q, k, v) if call.hides else (k, v)) if call.masked else None
    return _attend(functools.partial(_attend_checked, call, found), found, q, k, v, *others)


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
    q, k, v, bias, sinks, band, out, lse_of_keys, found = residuals
    lse = lse_of_keys if sinks is None else jnp.logaddexp(lse_of_keys, sinks[None, :, None])
    is_seen = band.sees and bias is None
    is_empty = jnp.zeros_like(lse, bool) if is_seen else lse_of_keys == -jnp.inf

    def pull(
        inputs: Any, lse: jax.Array, off: jax.Array, out: jax.Array, dout: jax.Array | None
    ) -> tuple[Any, ...]:
        """Return the gradients of q, k, v, bias and sinks, from no row that is `off`."""
        dsinks = None if sinks is None else _sink_gradient(sinks, lse, out, dout, dlse)
        of_lse = None if dlse is None else jnp.where(off, 0, dlse)
        return *_pull(call, inputs, band, jnp.where(off, FAR, lse), out, dout, of_lse), dsinks

    def attend() -> tuple[Any, ...]:
        return pull((q, k, v, bias), lse, is_empty, out, dout)

    if not call.masked and bias is None:
        return attend()

    def isolate() -> tuple[Any, ...]:
        of_heads = None if dout is None else jnp.swapaxes(dout, 1, 2)
        lost, asked = lost_queries(lse_of_keys, of_heads, dlse)
        lost &= ~is_empty
        # With a weight and a cotangent of 0, these rows add exactly 0 even if they hold NaN.
        off, nan_rows = lost | is_empty, lost & asked
        off_rows = jnp.swapaxes(off, 1, 2)[..., None]
        clean_out = jnp.where(off_rows, 0, out).astype(out.dtype)
        clean_dout = None if dout is None else jnp.where(off_rows, 0, dout).astype(out.dtype)
        inputs = (finite(q), finite(k), finite(v)) if call.masked else (q, k, v)
        marked = jnp.where(lost, jnp.where(asked, jnp.nan, FAR), lse)
        dq, dk, dv, dbias, dsinks = pull((*inputs, bias), marked, off, clean_out, clean_dout)
        dq, dk, dv = _mark_nan(call, dq, dk, dv, bias, band, nan_rows)
        if dbias is not None:
            shared = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
            dbias = _set_nan(dbias, nan_rows.any(shared, keepdims=True))
        return dq, dk, dv, dbias, dsinks

    # NaN of a query is in its lse, if it sees a key.
    read = jnp.where(is_empty, 0, lse_of_keys), dout, dlse, None if is_seen or call.hides else q
    found = _holds_nan(*jax.tree.leaves(read)) | (False if found is None else found)
    return isolate_if(found, isolate, attend)


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


def _mark_nan(
    call: CudnnCall, dq: jax.Array, dk: jax.Array, dv: jax.Array, bias: jax.Array | None,
    band: Band, nan_rows: jax.Array,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Set gradients of NaN rows [rows, N, T], and of the keys that they see, to NaN."""
    seen = _seen(call, bias, band, dq.shape[1], dk.shape[1]) & nan_rows[..., None]
    by_query, by_key = jnp.swapaxes(nan_rows, 1, 2), jnp.swapaxes(seen.any(-2), 1, 2)
    by_key = by_key.reshape(*by_key.shape[:2], dk.shape[2], -1).any(-1)
    return _set_nan(dq, by_query), _set_nan(dk, by_key), _set_nan(dv, by_key)


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


def _set_nan(x: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.where(where[..., None], jnp.nan, x).astype(x.dtype)
