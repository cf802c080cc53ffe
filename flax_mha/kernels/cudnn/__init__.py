"""cuDNN's flash attention for NVIDIA GPUs, the kernel behind `jax.nn.dot_product_attention`.

    out = softmax(cap(q·kᵀ·scale) + bias, over a band of keys, and the sink)·v

Memory is O(T + S), except for a given bias, and times the number of packed documents for the lse.
Masks are cuDNN's native ones, not tables: causality, windows that end at the query, lengths (see
`mask`), packed documents.

The wrapper handles the cases that cuDNN does not define:

- For a fully masked row, cuDNN may return NaN. Such rows are replaced, forward and backward.
- NaN and infinity are removed from cuDNN's inputs, and put back into the rows that see them.
- cuDNN ignores the lse's cotangent. A second backward pass computes its gradient, only if needed.
- A sink scales cuDNN's output by out·σ(lse − sink). Given the scaled out and lse, cuDNN's backward
  pass computes the right gradients.

The wrapper was checked against a model of cuDNN and lowered for GPUs, not run on one.

Source: `jax._src.cudnn.fused_attention_stablehlo`. Its primitives are called directly, because
`jax.nn` rounds the lse to half precision and needs value heads as wide as key heads. Dao,
"FlashAttention-2", 2023.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import private_jax, shapes
from flax_mha.base.coordinates import flat_batch
from flax_mha.base.shapes import Dims
from flax_mha.kernels.cudnn import edge_cases, primitives
from flax_mha.kernels.cudnn import mask as bands
from flax_mha.kernels.cudnn.mask import Band
from flax_mha.kernels.cudnn.primitives import CudnnCall
from flax_mha.kernels.spec import AttentionSpec, Lowered, Platform, Refusal, Result, Sums
from flax_mha.scores import Bias, SoftCap
from flax_mha.sharding.shard_map import varying

# Before 9.10.2, windows allow no bias, and single queries no mask. 9.10.0 and 9.10.1 are broken.
OLDEST = (9, 10, 2)


def lower(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, platform: Platform
) -> Lowered | Refusal:
    """Prepare the call, or return the reason why this kernel does not support it."""
    dims = shapes.Dims.of(q, k, v)
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        return Refusal(f"takes float16 and bfloat16, got {q.dtype}")
    device = primitives.gpu(platform)
    if isinstance(device, str):
        return Refusal(device)
    if reason := _check_call(q, spec, dims, device, platform):
        return Refusal(reason)
    band = bands.lower(spec, dims)
    if isinstance(band, str):
        return Refusal(band)
    reason = _check_scores(q, spec, dims, device)
    if band.runs is not None:
        reason = reason or _check_runs(spec, dims, device, platform.auto_partitioned)
    if reason:
        return Refusal(reason)
    return functools.partial(_attend, q, k, v, spec, band, platform.auto_partitioned)


def _check_call(
    q: jax.Array, spec: AttentionSpec, dims: Dims, device: primitives.Gpu, platform: Platform
) -> str | None:
    """Return the reason against a call, apart from its mask and scores, or None."""
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
    if varying(q):
        return "inside jax.shard_map it needs check_vma=False"
    return None if platform.auto_partitioned else platform.not_partitionable


def _check_scores(
    q: jax.Array, spec: AttentionSpec, dims: Dims, device: primitives.Gpu
) -> str | None:
    if not spec.scores:
        return None
    if len(spec.scores) == 1 and type(spec.scores[0]) is SoftCap:
        if not primitives.takes_caps(device):
            return (
                f"has SoftCap from JAX 0.12, compute capability 9.0 and cuDNN (9, 13, 0) on, got "
                f"{jax.__version__} and {device}"
            )
        if _features(dims) > 128:
            return f"has SoftCap for at most 128 features, got {_features(dims)}"
        return None
    if len(spec.scores) > 1 or type(spec.scores[0]) is not Bias:
        names = ", ".join(type(mod).__name__ for mod in spec.scores)
        return f"changes scores by one Bias or one SoftCap only, got {names}"
    array = spec.scores[0].array.array
    if not array.dtype == q.dtype == jnp.bfloat16:
        return f"adds a bfloat16 bias to bfloat16 scores, got {array.dtype} to {q.dtype}"
    if array.shape[-2:] != (dims.T, dims.S):
        return (
            f"would spread a bias of {array.shape[-2:]} queries and keys to "
            f"T·S = {dims.T}·{dims.S}; if this is intended, broadcast it"
        )
    if dims.T % 2 or dims.S % 2:
        return f"takes a bias for even T and S, got {dims.T} and {dims.S}"
    return None


def _check_runs(
    spec: AttentionSpec, dims: Dims, device: primitives.Gpu, is_divided: bool
) -> str | None:
    """Return the reason against packed documents, or None."""
    if device.capability < (9, 0):
        return f"takes packed documents from compute capability 9.0 on, got {device.capability}"
    if dims.N != dims.K and not private_jax.PACKED_GROUPS:
        return (
            f"of packed documents JAX {jax.__version__} needs as many key/value heads as query "
            f"heads, got {dims.K} and {dims.N}"
        )
    if _features(dims) > 128:
        return f"takes packed documents in heads of at most 128 features, got {_features(dims)}"
    if spec.scores:
        return f"takes no {type(spec.scores[0]).__name__} of packed documents"
    if is_divided:
        return "packed documents on several devices need a mesh that says how to divide them"
    numbers = math.prod(dims.B) * dims.T * dims.N * _features(dims)
    if numbers >= 2**31:
        return f"counts numbers of packed queries in int32, got {numbers:,}"
    return None


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, band: Band, is_divided: bool,
    result: Result | None = None,
) -> Result:  # fmt: skip
    """Compute attention. Given a precomputed result, compute only its first derivatives.

    Heads are padded with zeros to a multiple of 8 features, with values as wide as keys. A scale
    that is an array multiplies the queries in their dtype. A bias below −2⁴¹ counts as −∞.
    """
    dims = shapes.Dims.of(q, k, v)
    rows = math.prod(dims.B)
    scale = spec.scale
    if not isinstance(scale, int | float | np.number):
        q, scale = q * jnp.asarray(scale, q.dtype), 1.0
    q, k, v = (_pad(x.reshape(rows, *x.shape[-3:]), _features(dims)) for x in (q, k, v))
    # `lower` allows at most one, a Bias or a SoftCap.
    (mod,) = spec.scores or (None,)
    cap = mod.cap if isinstance(mod, SoftCap) else None
    bias = None
    if isinstance(mod, Bias):
        bias = jnp.asarray(flat_batch(mod.array.array, dims))
        bias = jnp.maximum(bias, jnp.asarray(edge_cases.MIN_BIAS, bias.dtype))
    band = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), band)
    call = CudnnCall(float(scale), band.causal, band.left, is_divided, cap)
    sinks = None if spec.sinks is None else spec.sinks.astype(jnp.float32)
    by_row = given = None
    if result is not None:
        out, given = result
        out = _pad(out.reshape(rows, *out.shape[-3:]), _features(dims)).astype(q.dtype)
        by_row = out, given.lse.reshape(rows, dims.N, dims.T)
    out, lse = edge_cases.attend(call, spec.mask is not None, q, k, v, bias, sinks, band, by_row)
    out = out[..., : dims.Hv].reshape(*dims.B, dims.T, dims.N, dims.Hv)
    return out, Sums.of(lse.reshape(*dims.B, dims.N, dims.T), given)


def _pad(x: jax.Array, features: int) -> jax.Array:
    return jnp.pad(x, ((0, 0),) * 3 + ((0, features - x.shape[-1]),))


def _features(dims: Dims) -> int:
    """Return the padded number of features of queries, keys and values."""
    return 8 * -(-max(dims.H, dims.Hv) // 8)
