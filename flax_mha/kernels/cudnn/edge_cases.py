"""cuDNN's attention, and what it leaves open: rows that see nothing, NaN, lse, sinks.

With p = exp(scores − lse), cuDNN's backward pass computes d score = p·(dout·v − Σ dout·out) from
the lse and the out that it is given. So of a sink, which takes its share of cuDNN's output by the
lse, out′ = out·σ(lse − sink) and lse′ = log(exp(lse) + exp(sink)), it gives the gradients as it is.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_mha.kernels.cudnn import mask as bands
from flax_mha.kernels.cudnn import primitives
from flax_mha.kernels.cudnn.mask import Band
from flax_mha.kernels.cudnn.primitives import CudnnCall
from flax_mha.kernels.softmax import finite
from flax_mha.kernels.spec import Result

# Stands for −∞ in a bias, of which cuDNN makes NaN; it is the number that jax.nn takes. An lse
# below half of it is that of a row whose biases were all −∞.
NOTHING = -float(2**41)
# An lse that makes every weight exp(score − lse) vanish, and is no infinity to subtract.
_FAR = 1e30


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    call: CudnnCall, masked: bool, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None,
    sinks: jax.Array | None, band: Band, recalled: Result | None,
) -> Result:  # fmt: skip
    """Attend within rows.

    Args:
      call: what is known before tracing.
      masked: whether the call has a mask. With neither mask nor bias every row sees all, and NaN
        spreads by itself.
      q: [rows, T, N, F].
      k: [rows, S, K, F].
      v: [rows, S, K, F].
      bias: [rows|1, N|1, T, S], finite or NaN.
      sinks: float32 [N].
      band: with lengths of each row.
      recalled: the result, if it is known already, of these keys and others and without sinks: then
        only the gradients are computed.

    Returns:
      out [rows, T, N, F]; lse [rows, N, T], −∞ where no key is seen, and there is no sink.
    """
    return _attend(call, masked, q, k, v, bias, sinks, band, recalled)[0]


class _Saved(NamedTuple):
    """The operands, finite where there is a mask, the out with sinks, and the lse without them.

    So the lse tells which rows see no key (−∞), and which see NaN.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None
    band: Band
    out: jax.Array
    lse: jax.Array


def _attend(
    call: CudnnCall, masked: bool, q: jax.Array, k: jax.Array, v: jax.Array,
    bias: jax.Array | None, sinks: jax.Array | None, band: Band, recalled: Result | None,
) -> tuple[Result, _Saved]:  # fmt: skip
    """Return the result, and the values that its gradients need."""
    nan_rows = None
    if masked:
        nan_rows = _nan_rows(q, k, v, band) if recalled is None else None
        # In cuDNN's operands NaN would meet weights of 0, whatever it does with masked scores.
        q, k, v = finite(q), finite(k), finite(v)
    out, lse = recalled or _attend_keys(call, q, k, v, bias, band, nan_rows)
    saved = _Saved(q, k, v, bias, sinks, band, out, lse)
    if sinks is not None:
        out, lse = _add_sinks(out, lse, sinks)
    return (out, lse), saved._replace(out=out)


def _nan_rows(q: jax.Array, k: jax.Array, v: jax.Array, band: Band) -> jax.Array:
    """Return True for queries that see a value which is not finite, bool [rows, N, T]."""
    bad_q, bad_k, bad_v = (~jnp.isfinite(x).all(-1) for x in (q, k, v))
    start, end = band.keys(q.shape[1], k.shape[1])
    by_keys = bands.any_between(bad_k | bad_v, start, end)
    by_keys = jnp.repeat(by_keys, q.shape[2] // k.shape[2], 2)
    return jnp.swapaxes(by_keys | (bad_q & (end > start)[..., None]), 1, 2)


def _attend_keys(
    call: CudnnCall, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, band: Band,
    nan_rows: jax.Array | None,
) -> Result:  # fmt: skip
    """Attend by cuDNN; 0 and −∞ for rows that see nothing, NaN for nan_rows [rows, N, T]."""
    out, lse = primitives.forward(call, q, k, v, bias, *band.operands())
    lse = lse if band.runs is None else band.runs.lse(lse)
    if nan_rows is None and bias is None:
        return out, lse
    start, end = band.keys(q.shape[1], k.shape[1])
    is_empty = (end <= start)[:, None]
    if bias is not None:
        is_empty = is_empty | (lse < NOTHING / 2)
    lse = jnp.where(is_empty, -jnp.inf, lse)
    if nan_rows is not None:
        lse = jnp.where(nan_rows, jnp.nan, lse)
    by_query = jnp.swapaxes(lse, 1, 2)[..., None]
    out = jnp.where(by_query == -jnp.inf, 0, jnp.where(jnp.isnan(by_query), jnp.nan, out))
    return out.astype(q.dtype), lse


def _add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> Result:
    """Add to each head's keys its sink, which gives nothing."""
    sinks = sinks[None, :, None]
    share = jnp.where(lse == -jnp.inf, 0.0, jax.nn.sigmoid(lse - sinks))
    whole = out.astype(share.dtype) * jnp.swapaxes(share, 1, 2)[..., None]
    return whole.astype(out.dtype), jnp.logaddexp(lse, sinks)


def _forward(call: CudnnCall, masked: bool, *primals: Any) -> tuple[Result, _Saved]:
    return _attend(call, masked, *jax.tree.map(lambda x: x.value, primals))


def _backward(call: CudnnCall, masked: bool, saved: _Saved, cotangents: Any) -> tuple[Any, ...]:
    dout, dlse = (
        None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents
    )
    out, lse, sinks = saved.out, saved.lse, saved.sinks
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks[None, :, None])
    has_edges = masked or saved.bias is not None
    nan_rows = jnp.isnan(saved.lse)
    # Without weight and without cotangent these rows add exactly 0, though they hold NaN.
    off = nan_rows | (saved.lse == -jnp.inf) if has_edges else None
    if off is not None:
        off_rows = jnp.swapaxes(off, 1, 2)[..., None]
        out = jnp.where(off_rows, 0, out).astype(out.dtype)
        dout = None if dout is None else jnp.where(off_rows, 0, dout).astype(out.dtype)
    dsinks = None if sinks is None else _sink_gradient(sinks, lse, out, dout, dlse)
    if off is not None:
        lse = jnp.where(off, _FAR, lse)
        dlse = None if dlse is None else jnp.where(off, 0, dlse)
    dq, dk, dv, dbias = _pull(call, saved, lse, out, dout, dlse)
    if has_edges:
        dq, dk, dv = _mark_edges(dq, dk, dv, saved.band, nan_rows)
    if saved.bias is not None:
        shared = tuple(axis for axis in (0, 1) if saved.bias.shape[axis] == 1)
        dbias = _set_nan(dbias, nan_rows.any(shared, keepdims=True))
    return dq, dk, dv, dbias, dsinks, None, None


attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _pull(
    call: CudnnCall, saved: _Saved, lse: jax.Array, out: jax.Array, dout: jax.Array | None,
    dlse: jax.Array | None,
) -> Any:  # fmt: skip
    """Return the gradients of q, k, v and bias by cuDNN, a pass for each cotangent there is."""
    q, k, v, bias, band = saved.q, saved.k, saved.v, saved.bias, saved.band
    pull = functools.partial(primitives.backward, call)
    operands = (bias, *band.operands(), lse if band.runs is None else band.runs.by_run(lse))
    gradients = jax.tree.map(jnp.zeros_like, (q, k, v, bias))
    if dout is not None:
        gradients = pull(q, k, v, *operands, out, dout)
    if dlse is not None:
        # d score = p·(dout·v − dout·out), where p·dlse is missing: give values that are 1 in one
        # feature, dlse there in place of dout, and 0 in place of out.
        one = jnp.zeros_like(v).at[..., 0].set(1)
        of_lse = jnp.zeros_like(out).at[..., 0].set(jnp.swapaxes(dlse, 1, 2).astype(out.dtype))
        dq, dk, _, dbias = pull(q, k, one, *operands, jnp.zeros_like(out), of_lse)
        more = dq, dk, jnp.zeros_like(v), dbias
        gradients = jax.tree.map(jnp.add, gradients, more)
    return gradients


def _mark_edges(
    dq: jax.Array, dk: jax.Array, dv: jax.Array, band: Band, nan_rows: jax.Array
) -> tuple[jax.Array, ...]:
    """Set gradients of NaN rows and of the keys they see to NaN, and unwritten ones to 0."""
    T, S = dq.shape[1], dk.shape[1]
    by_query = jnp.swapaxes(nan_rows, 1, 2)
    start, end = band.queries(T, S)
    by_key = bands.any_between(by_query, start, end)
    by_key = by_key.reshape(*by_key.shape[:2], dk.shape[2], -1).any(-1)
    if band.runs is not None:
        # cuDNN writes gradients of the tokens of documents alone.
        first, last = band.keys(T, S)
        dq = jnp.where((last <= first)[..., None, None], 0, dq)
        dk, dv = (jnp.where((end <= start)[..., None, None], 0, x) for x in (dk, dv))
    return _set_nan(dq, by_query), _set_nan(dk, by_key), _set_nan(dv, by_key)


def _sink_gradient(
    sinks: jax.Array, lse: jax.Array, out: jax.Array, dout: jax.Array | None,
    dlse: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """Return Σ p·(dlse − dout·out) over each head's queries: a sink gives nothing."""
    weight = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(sinks[None, :, None] - lse))
    delta = jnp.zeros_like(lse) if dlse is None else dlse
    if dout is not None:
        delta -= jnp.einsum("btnf,btnf->bnt", dout, out, preferred_element_type=jnp.float32)
    return (weight * delta).sum((0, 2))


def _set_nan(x: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.where(where[..., None], jnp.nan, x).astype(x.dtype)
