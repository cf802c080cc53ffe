"""cuDNN's flash attention for NVIDIA GPUs, the one behind `jax.nn.dot_product_attention`.

    out = softmax(q·kᵀ·scale + bias, over a band of keys)·v

Memory is O(T + S), beside a bias that is given. Masks are native ones, never tables: causality,
windows that end at the query, lengths (see `band`).

What cuDNN leaves open is settled around it: a row that sees nothing, for which it may give NaN, is
replaced forward and backward; NaN and infinity are taken out of its operands, and put back into the
rows that see them, found by counting; the gradient of the lse, which it ignores, is a second
backward pass, made only where lse is differentiated.

The wrapper was checked against a model of cuDNN and lowered for GPUs, not run on one.

Source: `jax._src.cudnn.fused_attention_stablehlo`, whose primitives are called one by one:
`jax.nn` rounds the lse to half precision and wants value heads as wide as key heads. Dao,
"FlashAttention-2", 2023.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import mesh_axes, shapes
from flax_mha.grid import flat_batch
from flax_mha.kernels.cudnn import band as bands
from flax_mha.kernels.cudnn import fused
from flax_mha.kernels.cudnn.band import Band
from flax_mha.kernels.cudnn.fused import Kind
from flax_mha.kernels.finite import finite
from flax_mha.kernels.platform import Platform
from flax_mha.kernels.spec import AttentionSpec, Lowered, Refusal
from flax_mha.scores import Bias
from flax_mha.shapes import Dims

# Before 9.10.2 windows take no bias and single queries no mask; 9.10.0 and 9.10.1 are broken.
OLDEST = (9, 10, 2)
# Stands for −∞ in a bias, of which cuDNN makes NaN; it is the number that jax.nn takes. An lse
# below half of it is that of a row whose biases were all −∞.
_NOTHING = -float(2**41)
# An lse that makes every weight exp(score − lse) vanish, and is no infinity to subtract.
_FAR = 1e30


def lower(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, platform: Platform
) -> Lowered | Refusal:
    """The call made ready, or the reason why this kernel can't run it."""
    dims = shapes.Dims.of(q, k, v)
    if reason := _lacks(q, spec, dims, platform):
        return Refusal(reason)
    band = bands.lower(spec, dims)
    if isinstance(band, str):
        return Refusal(band)
    if reason := _refuses_scores(q, spec, dims):
        return Refusal(reason)
    return functools.partial(_attend, q, k, v, spec, band, platform.spread)


def _lacks(q: jax.Array, spec: AttentionSpec, dims: Dims, platform: Platform) -> str | None:
    """What a call asks for that cuDNN does not have, its mask and its bias apart."""
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, got {q.dtype}"
    device = fused.gpu(platform)
    if isinstance(device, str):
        return device
    if device.capability < (8, 0) or device.cudnn < OLDEST:
        return f"needs compute capability 8.0 and cuDNN {OLDEST}, got {device}"
    if not (dims.T and dims.S and math.prod(dims.B)):
        return "there are no rows, queries or keys"
    if dims.T == dims.S == 1:
        return "has no gradient of one query and one key"
    if _features(dims) > device.features:
        return f"takes heads of at most {device.features} features here, got {_features(dims)}"
    if spec.dropout is not None:
        return "has no dropout that is a function of positions"
    if spec.precision is not None:
        return f"has no precision setting, got {spec.precision}"
    if spec.sinks is not None:
        return "has no sinks"
    if mesh_axes.varying(q):
        return "inside jax.shard_map it needs check_vma=False"
    return None if platform.spread else platform.undivided


def _refuses_scores(q: jax.Array, spec: AttentionSpec, dims: Dims) -> str | None:
    if not spec.scores:
        return None
    if len(spec.scores) > 1 or type(spec.scores[0]) is not Bias:
        names = ", ".join(type(mod).__name__ for mod in spec.scores)
        return f"changes scores by one Bias only, got {names}"
    array = spec.scores[0].array.array
    if not array.dtype == q.dtype == jnp.bfloat16:
        return f"adds a bfloat16 bias to bfloat16 scores, got {array.dtype} to {q.dtype}"
    if array.shape[-2:] != (dims.T, dims.S):
        return (
            f"would spread a bias of {array.shape[-2:]} queries and keys to "
            f"T·S = {dims.T}·{dims.S}; where that is meant, broadcast it"
        )
    if dims.T % 2 or dims.S % 2:
        return f"takes a bias for even T and S, got {dims.T} and {dims.S}"
    return None


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, band: Band, spread: bool
) -> tuple[jax.Array, jax.Array]:
    """See `reference.attend`. First derivatives only.

    Heads are filled with zeros to a multiple of 8 features, as wide in values as in keys. A scale
    that is an array, not a number, is multiplied to the queries, in their own dtype. A bias below
    −2⁴¹ counts as −∞.
    """
    dims = shapes.Dims.of(q, k, v)
    rows = math.prod(dims.B)
    scale = spec.scale
    if not isinstance(scale, int | float | np.number):
        q, scale = q * jnp.asarray(scale, q.dtype), 1.0
    q, k, v = (_filled(x.reshape(rows, *x.shape[-3:]), _features(dims)) for x in (q, k, v))
    bias = None
    if spec.scores:
        # One Bias is all that `lower` lets pass.
        bias = jnp.asarray(flat_batch(spec.scores[0].array.array, dims))  # type: ignore[attr-defined]
        bias = jnp.maximum(bias, jnp.asarray(_NOTHING, bias.dtype))
    band = jax.tree.map(lambda x: jnp.broadcast_to(x, rows), band)
    # Without a mesh XLA divides it: JAX tells it how.
    kind = Kind(float(scale), band.causal, band.left, spread)
    out, lse = _rows(kind, spec.mask is not None, q, k, v, bias, band)
    out = out[..., : dims.Hv].reshape(*dims.B, dims.T, dims.N, dims.Hv)
    return out, lse.reshape(*dims.B, dims.N, dims.T)


def _rows(
    kind: Kind, masked: bool, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None,
    band: Band,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Attention of rows.

    Args:
      kind: what cuDNN is to compute.
      masked: whether the call has a mask.
      q: [rows, T, N, F].
      k: [rows, S, K, F].
      v: [rows, S, K, F].
      bias: [rows|1, N|1, T, S], finite or NaN.
      band: with lengths of each row.

    Returns:
      out [rows, T, N, F]; lse [rows, N, T], −∞ where no key is seen.
    """
    spoiled = None
    if masked:
        # In its operands NaN would meet weights of 0, whatever cuDNN does with masked scores.
        bad_q, bad_k, bad_v = (~jnp.isfinite(x).all(-1) for x in (q, k, v))
        start, end = band.keys(q.shape[1], k.shape[1])
        spoiled = bands.any_between(bad_k | bad_v, start, end)
        spoiled = jnp.repeat(spoiled, q.shape[2] // k.shape[2], 2)
        spoiled = jnp.swapaxes(spoiled | (bad_q & (end > start)[..., None]), 1, 2)
        q, k, v = finite(q), finite(k), finite(v)
    return _settled(kind, q, k, v, bias, band, spoiled)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _settled(
    kind: Kind, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, band: Band,
    spoiled: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The attention of cuDNN, 0 and −∞ for rows that see nothing, NaN for the spoiled [rows, N, T].

    With neither mask nor bias every row sees all, and NaN spreads by itself.
    """
    out, lse = fused.forward(kind, q, k, v, bias, *_at_least_one(band))
    if spoiled is None and bias is None:
        return out, lse
    start, end = band.keys(q.shape[1], k.shape[1])
    empty = (end <= start)[:, None]
    if bias is not None:
        empty = empty | (lse < _NOTHING / 2)
    lse = jnp.where(empty, -jnp.inf, lse)
    if spoiled is not None:
        lse = jnp.where(spoiled, jnp.nan, lse)
    by_row = jnp.swapaxes(lse, 1, 2)[..., None]
    out = jnp.where(by_row == -jnp.inf, 0, jnp.where(jnp.isnan(by_row), jnp.nan, out))
    return out.astype(q.dtype), lse


def _settled_forward(kind: Kind, *primals: Any) -> tuple[Any, Any]:
    args = jax.tree.map(lambda x: x.value, primals)
    out, lse = _settled(kind, *args)
    return (out, lse), (*args, out, lse)


def _settled_backward(kind: Kind, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, bias, band, spoiled, out, lse = residuals
    dout, dlse = (
        None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents
    )
    settled = spoiled is not None or bias is not None
    if settled:
        spoiled = jnp.isnan(lse)
        # Without weight and without cotangent these rows add exactly 0, though they hold NaN.
        off = spoiled | (lse == -jnp.inf)
        off_rows = jnp.swapaxes(off, 1, 2)[..., None]
        lse = jnp.where(off, _FAR, lse)
        out = jnp.where(off_rows, 0, out).astype(out.dtype)
        dout = None if dout is None else jnp.where(off_rows, 0, dout).astype(out.dtype)
        dlse = None if dlse is None else jnp.where(off, 0, dlse)
    pull = functools.partial(fused.backward, kind)
    gradients = jax.tree.map(jnp.zeros_like, (q, k, v, bias))
    if dout is not None:
        gradients = pull(q, k, v, bias, *_at_least_one(band), lse, out, dout)
    if dlse is not None:
        # d score = p·(dout·v − dout·out), of which p·dlse is what is missing: values that are 1 in
        # one feature, dlse there in place of dout, and 0 in place of out.
        one = jnp.zeros_like(v).at[..., 0].set(1)
        ask = jnp.zeros_like(out).at[..., 0].set(jnp.swapaxes(dlse, 1, 2).astype(out.dtype))
        more = pull(q, k, one, bias, *_at_least_one(band), lse, jnp.zeros_like(out), ask)
        more = more[0], more[1], jnp.zeros_like(v), more[3]
        gradients = jax.tree.map(jnp.add, gradients, more)
    dq, dk, dv, dbias = gradients
    if settled:
        dq = _with_nan(dq, jnp.swapaxes(spoiled, 1, 2))
        seen = bands.any_between(jnp.swapaxes(spoiled, 1, 2), *band.queries(q.shape[1], k.shape[1]))
        seen = seen.reshape(*seen.shape[:2], k.shape[2], -1).any(-1)
        dk, dv = _with_nan(dk, seen), _with_nan(dv, seen)
    if bias is not None:
        axes = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
        dbias = _with_nan(dbias, spoiled.any(axes, keepdims=True))
    return dq, dk, dv, dbias, None, None


_settled.defvjp(_settled_forward, _settled_backward, symbolic_zeros=True)


def _at_least_one(band: Band) -> tuple[jax.Array, jax.Array]:
    """The lengths for cuDNN; rows without any are settled by us."""
    return jnp.maximum(band.q, 1), jnp.maximum(band.k, 1)


def _with_nan(x: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.where(where[..., None], jnp.nan, x).astype(x.dtype)


def _filled(x: jax.Array, features: int) -> jax.Array:
    return jnp.pad(x, ((0, 0),) * 3 + ((0, features - x.shape[-1]),))


def _features(dims: Dims) -> int:
    """Of queries, keys and values as cuDNN gets them."""
    return 8 * -(-max(dims.H, dims.Hv) // 8)
