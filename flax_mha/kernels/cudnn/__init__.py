"""cuDNN's flash attention for NVIDIA GPUs, the kernel behind `jax.nn.dot_product_attention`.

    out = softmax(q·kᵀ·scale + bias, over a band of keys, and the sink)·v

It is `reference` without score functions and dropout. In half precision it rounds the weights
before their matmul with the values, and its gradients read the rounded output.

Memory is O(T + S), plus a bias, times the packed documents for the lse. Causality, windows that end
at the query, lengths and packed documents run in cuDNN (see `bands`). Other masks become a bfloat16
bias [rows|1, N|1, T, S]. Around cuDNN, this package defines three cases:

- Fully masked rows, where cuDNN may return NaN, have an output of 0, and weights of 0 backward.
- A second backward pass, only if needed, computes the gradient of the lse, which cuDNN ignores.
- A sink multiplies the output by σ(lse − sink). From the scaled out and lse, cuDNN's backward pass
  computes the right gradients.

A hidden pair has a bias of −2⁴², which float16 cannot hold, and entries of a user's bias below −2⁴¹
count as −∞. cuDNN always gets lengths, full ones if the call has none: without them its backward
kernels for Hopper may return NaN for rows whose scores are all below −88 (issue 1072 of
NVIDIA/cudnn-frontend). The backward pass computes weights as exp(score − lse). A float32 lse beyond
10⁴ has few digits after the point, so gradients are wrong there, and so are the shares of devices
that merge outputs. Dropout is refused because JAX takes its seed as a constant of the program.

It was checked against a model of cuDNN, and on an H100 against the oracle (cuDNN 9.19, JAX
0.12.0.1), except for the layout of a cache.

Source: `jax._src.cudnn.fused_attention_stablehlo`, called directly because `jax.nn` rounds the lse
to half precision and needs value heads as wide as key heads. Dao, "FlashAttention-2", 2023.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import numerics, shapes
from flax_mha.base.coordinates import At, flat_batch
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call import limits
from flax_mha.kernels.call.mask_parts import conjuncts
from flax_mha.kernels.call.spec import AttentionSpec, Lowered, Platform, Result, Sums, Unsupported
from flax_mha.kernels.call.stored import Stored, dequantize
from flax_mha.kernels.cudnn import bands, edge_cases, primitives
from flax_mha.kernels.cudnn.bands import Band
from flax_mha.kernels.cudnn.primitives import CudnnCall
from flax_mha.masks import Mask
from flax_mha.masks.algebra import TracedNumbers, evaluate
from flax_mha.scores import Bias
from flax_mha.sharding.shard_map import varying

# The most numbers of a bias that hides pairs: 1 GiB. Other kernels keep no table.
MOST_HIDDEN = 2**29
# Before 9.10.2, windows allow no bias, and single queries no mask. 9.10.0 and 9.10.1 are broken.
OLDEST = (9, 10, 2)
# Before JAX 0.12, the offsets of packed keys counted query heads instead of key/value heads, which
# is wrong for grouped queries (JAX's issue 39521).
PACKED_GROUPS = jax.__version_info__ >= (0, 12)


def lower(
    q: jax.Array, k: jax.Array | Stored, v: jax.Array | Stored, spec: AttentionSpec
) -> Lowered:
    """Prepare the call, or raise the reason why this kernel does not support it."""
    limits.check(spec, q, k)
    q, k, spec = spec.turned(q, k)
    platform = spec.platform
    dims, heads_first = shapes.Dims.of(q, k, v), isinstance(k, Stored)
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        raise Unsupported(f"takes float16 and bfloat16, got {q.dtype}")
    device = primitives.gpu(platform)
    if isinstance(device, str):
        raise Unsupported(device)
    if reason := _check_call(q, spec, dims, device, platform) or _check_scores(q, spec, dims):
        raise Unsupported(reason)
    takes_runs = _takes_runs(spec, dims, device, platform.auto_partitioned)
    band, hidden = bands.lower(spec, dims, takes_runs)
    if hidden is not None and (reason := _check_hidden(q, spec, hidden, dims)):
        raise Unsupported(reason)
    k, v = dequantize(k), dequantize(v)
    static = {"divisible": platform.auto_partitioned, "heads_first": heads_first}
    return Lowered(functools.partial(_attend, q, k, v, spec, band, hidden, static), True)


def _check_call(
    q: jax.Array, spec: AttentionSpec, dims: Dims, device: primitives.Gpu, platform: Platform
) -> str | None:
    """Return the reason against a call, apart from its mask and scores, or None."""
    capability, version = device
    if capability < (8, 0) or version < OLDEST:
        return f"needs compute capability 8.0 and cuDNN {OLDEST}, got {capability} and {version}"
    if not (dims.T and dims.S and math.prod(dims.B)):
        return "there are no rows, queries or keys"
    if dims.T == dims.S == 1:
        return "has no gradient of one query and one key"
    most = 256 if capability[0] == 9 else 128  # in the backward pass
    if _features(dims) > most:
        return f"takes heads of at most {most} features here, got {_features(dims)}"
    if spec.dropout is not None:
        return "has no dropout that is a function of positions"
    if spec.precision is not None:
        return f"has no precision setting, got {spec.precision}"
    if varying(q):
        return "inside jax.shard_map it needs check_vma=False"
    return None if platform.auto_partitioned else platform.not_partitionable


def _check_scores(q: jax.Array, spec: AttentionSpec, dims: Dims) -> str | None:
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
            f"T·S = {dims.T}·{dims.S}; if this is intended, broadcast it"
        )
    return None


def _check_hidden(q: jax.Array, spec: AttentionSpec, mask: Mask, dims: Dims) -> str | None:
    """Return the reason against a bias that hides pairs, or None."""
    (name, *_) = (type(x).__name__ for x in conjuncts(mask))
    if q.dtype != jnp.bfloat16:
        return f"hides pairs of {name} by a bfloat16 bias, got {q.dtype}"
    size = math.prod(jax.eval_shape(lambda: _allowed(mask, spec, dims)).shape[:2]) * dims.T * dims.S
    if size > MOST_HIDDEN:
        return (
            f"would hide pairs of {name} by a bias of {2 * size:,} bytes, more than "
            f"{2 * MOST_HIDDEN:,}"
        )
    return None


def _allowed(mask: Mask, spec: AttentionSpec, dims: Dims) -> jax.Array:
    """Return the pairs that a mask allows, bool [rows|1, N|1, T|1, S|1]."""
    # Of arrays of JAX, so that pairs are computed on the GPU, and are no constant of the program.
    at = At(*map(jnp.asarray, spec.at(dims)))
    return jnp.asarray(flat_batch(evaluate(mask, at), dims))


def _takes_runs(spec: AttentionSpec, dims: Dims, device: primitives.Gpu, is_divided: bool) -> bool:
    """Return True if packed documents can be sequences of their own."""
    return (
        device[0] >= (9, 0)
        and (dims.N == dims.K or PACKED_GROUPS)
        and _features(dims) <= 128
        and not spec.scores
        and not is_divided
        # They are counted in int32.
        and math.prod(dims.B) * dims.T * dims.N * _features(dims) < 2**31
    )


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, band: Band, hidden: Mask | None,
    static: dict[str, bool], result: Result | None = None,
) -> Result:  # fmt: skip
    """Compute attention, or only the first derivatives of a precomputed result.

    Heads are padded to a multiple of 8 features with values as wide as keys, and with a bias,
    tokens to an even number. A traced scale multiplies the queries. A bias below −2⁴¹ counts as −∞.
    """
    dims = shapes.Dims.of(q, k, v)
    rows, features = math.prod(dims.B), _features(dims)
    scale = spec.scale
    if not isinstance(scale, int | float | np.number):
        q, scale = numerics.scaled(q, scale), 1.0
    # `lower` allows at most one, a Bias.
    (mod,) = spec.scores or (None,)
    bias = jnp.asarray(flat_batch(mod.array.array, dims)) if isinstance(mod, Bias) else None
    call = CudnnCall(float(scale), band.causal, band.left, learned=bias is not None, **static)
    if bias is not None:
        bias = jnp.maximum(bias, jnp.asarray(edge_cases.MIN_BIAS, bias.dtype))
    if hidden is not None:
        allowed = _allowed(hidden, spec, dims)
        bias = jnp.where(
            allowed, jnp.zeros((), q.dtype) if bias is None else bias,
            jnp.asarray(edge_cases.HIDDEN, q.dtype),
        )  # fmt: skip
        if isinstance(hidden, TracedNumbers):
            bias = jnp.where(flat_batch(hidden.others(), dims), jnp.nan, bias)
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], dims.T, dims.S))
    odd_q, odd_k = (0, 0) if bias is None else (dims.T % 2, dims.S % 2)
    if bias is not None:
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, odd_q), (0, odd_k)))
    band = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), band)
    sinks = None if spec.sinks is None else spec.sinks.astype(jnp.float32)

    def pad(x: jax.Array, odd: int) -> jax.Array:
        x = x.reshape(rows, *x.shape[-3:])
        return jnp.pad(x, ((0, 0), (0, odd), (0, 0), (0, features - x.shape[-1])))

    by_row = given = None
    if result is not None:
        out, given = result
        lse = given.lse.reshape(rows, dims.N, dims.T)
        by_row = pad(out, odd_q).astype(q.dtype), jnp.pad(lse, ((0, 0), (0, 0), (0, odd_q)))
    q, k, v = pad(q, odd_q), pad(k, odd_k), pad(v, odd_k)
    out, lse = edge_cases.attend(call, q, k, v, bias, sinks, band, by_row)
    out = out[:, : dims.T, :, : dims.Hv].reshape(*dims.B, dims.T, dims.N, dims.Hv)
    lse = lse[..., : dims.T].reshape(*dims.B, dims.N, dims.T)
    if spec.reads_lse:
        return out, Sums.of(lse, given)
    zeros = jnp.zeros_like(lse)
    return out, Sums(zeros, zeros)


def _features(dims: Dims) -> int:
    """Return the padded number of features of queries, keys and values."""
    return 8 * -(-max(dims.H, dims.Hv) // 8)
