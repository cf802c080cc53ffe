"""cuDNN's attention with what it leaves open settled: rows that see nothing, NaN, lse, sinks.

With p = exp(scores − lse), cuDNN's backward pass computes d score = p·(dout·v − Σ dout·out) from
the lse and the out that it is given. So of a sink, which takes its share of cuDNN's output by the
lse, out′ = out·σ(lse − sink) and lse′ = log(exp(lse) + exp(sink)), it gives the gradients as it is.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha.kernels.cudnn import mask as bands
from flax_mha.kernels.cudnn import primitives
from flax_mha.kernels.cudnn.mask import Band
from flax_mha.kernels.cudnn.primitives import Kind
from flax_mha.kernels.softmax import finite
from flax_mha.kernels.spec import Result

# Stands for −∞ in a bias, of which cuDNN makes NaN; it is the number that jax.nn takes. An lse
# below half of it is that of a row whose biases were all −∞.
NOTHING = -float(2**41)
# An lse that makes every weight exp(score − lse) vanish, and is no infinity to subtract.
_FAR = 1e30


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    kind: Kind, masked: bool, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None,
    sinks: jax.Array | None, band: Band, recalled: Result | None,
) -> Result:  # fmt: skip
    """Attention of rows.

    Args:
      kind: what cuDNN is to compute.
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
    return _attend(kind, masked, q, k, v, bias, sinks, band, recalled)[0]


def _attend(
    kind: Kind, masked: bool, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None,
    sinks: jax.Array | None, band: Band, recalled: Result | None,
) -> tuple[Result, Any]:  # fmt: skip
    """The result, and what its gradients take."""
    spoiled = None
    if masked:
        spoiled = _spoiled(q, k, v, band) if recalled is None else None
        # In cuDNN's operands NaN would meet weights of 0, whatever it does with masked scores.
        q, k, v = finite(q), finite(k), finite(v)
    out, lse = recalled or _of_keys(kind, q, k, v, bias, band, spoiled)
    # The lse without the sink tells which rows see nothing.
    of_keys = lse
    if sinks is not None:
        out, lse = _sunk(out, lse, sinks)
    return (out, lse), (q, k, v, bias, sinks, band, out, of_keys)


def _spoiled(q: jax.Array, k: jax.Array, v: jax.Array, band: Band) -> jax.Array:
    """The rows that see what is not finite, bool [rows, N, T]."""
    bad_q, bad_k, bad_v = (~jnp.isfinite(x).all(-1) for x in (q, k, v))
    start, end = band.keys(q.shape[1], k.shape[1])
    spoiled = bands.any_between(bad_k | bad_v, start, end)
    spoiled = jnp.repeat(spoiled, q.shape[2] // k.shape[2], 2)
    return jnp.swapaxes(spoiled | (bad_q & (end > start)[..., None]), 1, 2)


def _of_keys(
    kind: Kind, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, band: Band,
    spoiled: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Attention by cuDNN, 0 and −∞ for rows that see nothing, NaN for the spoiled [rows, N, T]."""
    out, lse = primitives.forward(kind, q, k, v, bias, *band.operands())
    lse = lse if band.runs is None else band.runs.lse(lse)
    if spoiled is None and bias is None:
        return out, lse
    start, end = band.keys(q.shape[1], k.shape[1])
    empty = (end <= start)[:, None]
    if bias is not None:
        empty = empty | (lse < NOTHING / 2)
    lse = jnp.where(empty, -jnp.inf, lse)
    if spoiled is not None:
        lse = jnp.where(spoiled, jnp.nan, lse)
    by_row = jnp.swapaxes(lse, 1, 2)[..., None]
    out = jnp.where(by_row == -jnp.inf, 0, jnp.where(jnp.isnan(by_row), jnp.nan, out))
    return out.astype(q.dtype), lse


def _sunk(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> Result:
    """With the sink as one more key, which gives nothing."""
    sinks = sinks[None, :, None]
    share = jnp.where(lse == -jnp.inf, 0.0, jax.nn.sigmoid(lse - sinks))
    whole = out.astype(share.dtype) * jnp.swapaxes(share, 1, 2)[..., None]
    return whole.astype(out.dtype), jnp.logaddexp(lse, sinks)


def _forward(kind: Kind, masked: bool, *primals: Any) -> tuple[Result, Any]:
    return _attend(kind, masked, *jax.tree.map(lambda x: x.value, primals))


def _backward(kind: Kind, masked: bool, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, bias, sinks, band, out, lse = residuals
    dout, dlse = (
        None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents
    )
    whole = lse if sinks is None else jnp.logaddexp(lse, sinks[None, :, None])
    dlse_of_sink = dlse
    spoiled = jnp.isnan(lse)
    settled = masked or bias is not None
    if settled:
        # Without weight and without cotangent these rows add exactly 0, though they hold NaN.
        off = spoiled | (lse == -jnp.inf)
        off_rows = jnp.swapaxes(off, 1, 2)[..., None]
        lse = jnp.where(off, _FAR, whole)
        out = jnp.where(off_rows, 0, out).astype(out.dtype)
        dout = None if dout is None else jnp.where(off_rows, 0, dout).astype(out.dtype)
        dlse = None if dlse is None else jnp.where(off, 0, dlse)
    else:
        lse = whole
    dq, dk, dv, dbias = _pulled(kind, q, k, v, bias, band, lse, out, dout, dlse)
    if settled:
        dq, dk, dv = _settled_gradients(dq, dk, dv, band, spoiled)
    if bias is not None:
        axes = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
        dbias = _with_nan(dbias, spoiled.any(axes, keepdims=True))
    dsinks = None if sinks is None else _of_sinks(sinks, whole, out, dout, dlse_of_sink)
    return dq, dk, dv, dbias, dsinks, None, None


attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _pulled(
    kind: Kind, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, band: Band,
    lse: jax.Array, out: jax.Array, dout: jax.Array | None, dlse: jax.Array | None,
) -> Any:  # fmt: skip
    """The gradients of q, k, v and bias by cuDNN, a pass for each cotangent that is there."""
    pull = functools.partial(primitives.backward, kind)
    operands = band.operands()
    lse = lse if band.runs is None else band.runs.by_run(lse)
    gradients = jax.tree.map(jnp.zeros_like, (q, k, v, bias))
    if dout is not None:
        gradients = pull(q, k, v, bias, *operands, lse, out, dout)
    if dlse is not None:
        # d score = p·(dout·v − dout·out), of which p·dlse is what is missing: values that are 1 in
        # one feature, dlse there in place of dout, and 0 in place of out.
        one = jnp.zeros_like(v).at[..., 0].set(1)
        ask = jnp.zeros_like(out).at[..., 0].set(jnp.swapaxes(dlse, 1, 2).astype(out.dtype))
        more = pull(q, k, one, bias, *operands, lse, jnp.zeros_like(out), ask)
        more = more[0], more[1], jnp.zeros_like(v), more[3]
        gradients = jax.tree.map(jnp.add, gradients, more)
    return gradients


def _settled_gradients(
    dq: jax.Array, dk: jax.Array, dv: jax.Array, band: Band, spoiled: jax.Array
) -> tuple[jax.Array, ...]:
    """Those of q, k and v, NaN where a spoiled row reads, or is; 0 where nothing was written."""
    T, S = dq.shape[1], dk.shape[1]
    by_query = jnp.swapaxes(spoiled, 1, 2)
    start, end = band.queries(T, S)
    seen = bands.any_between(by_query, start, end)
    seen = seen.reshape(*seen.shape[:2], dk.shape[2], -1).any(-1)
    if band.runs is not None:
        # cuDNN writes gradients of the tokens of documents alone.
        first, last = band.keys(T, S)
        dq = jnp.where((last <= first)[..., None, None], 0, dq)
        dk, dv = (jnp.where((end <= start)[..., None, None], 0, x) for x in (dk, dv))
    return _with_nan(dq, by_query), _with_nan(dk, seen), _with_nan(dv, seen)


def _of_sinks(
    sinks: jax.Array, lse: jax.Array, out: jax.Array, dout: jax.Array | None,
    dlse: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """A sink gives nothing: its gradient is Σ p·(dlse − dout·out) over its head's queries."""
    weight = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(sinks[None, :, None] - lse))
    delta = jnp.zeros_like(lse) if dlse is None else dlse
    if dout is not None:
        delta -= jnp.einsum("btnf,btnf->bnt", dout, out, preferred_element_type=jnp.float32)
    return (weight * delta).sum((0, 2))


def _with_nan(x: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.where(where[..., None], jnp.nan, x).astype(x.dtype)
