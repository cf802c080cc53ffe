"""Splash attention, JAX's sparse flash attention for TPUs.

    out = softmax(softcap(q·kᵀ·scale), over the keys that the mask allows)·v

It is `reference` without other score functions, sinks, dropout and lse, and rounds q once more in
half precision, by the scale. Memory is O(T + S). It skips blocks that are empty under a static
mask. In other blocks the mask is a function of positions and segment ids (see `computed_mask`).

`auto` prefers `flex`, which has more features. By its name, this kernel computes plain attention:
one static mask for all rows and heads, one array of segment ids or lengths, and a soft cap. A
second such array would need an id for each pair of ids, by a sort. An lse is refused because JAX's
gradients of this kernel ignore it. They multiply masked values by a weight of 0, so they are NaN
where the product of such a value and dout overflows.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`, with its own gradients. Dao,
"FlashAttention-2", 2023.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    DEFAULT_MASK_VALUE,
    BlockSizes,
    SegmentIds,
    make_splash_mha,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import MultiHeadMask

from flax_mha.base import shapes
from flax_mha.kernels.call import limits
from flax_mha.kernels.call.spec import AttentionSpec, Lowered, Sums, Unsupported
from flax_mha.kernels.chips import tpus
from flax_mha.kernels.splash import computed_mask
from flax_mha.kernels.splash.computed_mask import ComputedMask, Ids
from flax_mha.kernels.xla.tile_plan import Plan
from flax_mha.scores import SoftCap


def lower(q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> Lowered:
    """Prepare the call, or raise the reason why this kernel does not support it."""
    limits.check(spec, q, k)
    q, k, v, spec = spec.plain(q, k, v)
    dims = shapes.Dims.of(q, k, v)
    if reason := tpus.check(q, k, v) or _check_features(q, spec):
        raise Unsupported(reason)
    plan = Plan(dims, *tpus.blocks(dims))
    masks = computed_mask.lower(spec, plan)
    if isinstance(masks, str):
        raise Unsupported(masks)
    if spec.platform.not_partitionable:
        raise Unsupported(spec.platform.not_partitionable)
    return Lowered(functools.partial(_attend, q, k, v, spec, *masks, plan))


def _check_features(q: jax.Array, spec: AttentionSpec) -> str | None:
    """Return the reason against a call's features, or None."""
    if jax.config.read("jax_enable_x64"):
        return "does not run under jax_enable_x64"
    if spec.dropout is not None:
        return "has no dropout"
    if spec.sinks is not None:
        return "has no sinks"
    if spec.reads_lse:
        return "returns no lse"
    if spec.precision is not None:
        return f"has no precision setting, got {spec.precision}"
    setting = jax.config.jax_default_matmul_precision
    exact = ("highest", "float32") if q.dtype == jnp.float32 else ()
    if setting not in (None, "default", "bfloat16", *exact):
        return f"compiles no {q.dtype} matmuls in the precision {setting} that JAX is set to"
    if len(spec.scores) > 1 or not all(type(mod) is SoftCap for mod in spec.scores):
        names = ", ".join(type(mod).__name__ for mod in spec.scores)
        return f"changes scores by one SoftCap only, got {names}"
    return None


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, ids: Ids | None,
    mask: ComputedMask, plan: Plan,
) -> tuple[jax.Array, Sums]:  # fmt: skip
    """Compute attention, with first derivatives only."""
    dims, (T, S) = plan.dims, plan.padded
    q = (q.astype(jnp.float32) * spec.scale).astype(q.dtype)
    q, k, v = tpus.heads_first(q, T), tpus.heads_first(k, S), tpus.heads_first(v, S)
    if ids is not None:
        padded = (
            jnp.pad(x, ((0, 0), (0, to - x.shape[1]))) for x, to in zip(ids, (T, S), strict=True)
        )
        ids = SegmentIds(*(jnp.broadcast_to(x, (len(q), x.shape[1])) for x in padded))
    block_q, block_k = plan.block_q, plan.block_k
    kernel = make_splash_mha(
        MultiHeadMask([mask] * dims.N),
        block_sizes=BlockSizes(
            block_q, block_k, block_q_dkv=block_q, block_kv_dkv=block_k, block_q_dq=block_q,
            block_kv_dq=block_k,
        ),
        attn_logits_soft_cap=next((mod.cap for mod in spec.scores if type(mod) is SoftCap), None),
        residual_checkpoint_name="z",
        head_shards=1,
        q_seq_shards=1,
    )  # fmt: skip
    # Sinks with no weight beside a visible score, but all weight beside masked ones. With them, a
    # fully masked query has an output and gradients of exactly 0. Without them, splash averages
    # masked values.
    sinks = jnp.full(dims.N, DEFAULT_MASK_VALUE / 2, jnp.float32)
    out = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids, sinks))(q, k, v, ids)
    out = jnp.swapaxes(out[:, :, : dims.T], 1, 2).reshape(*dims.B, dims.T, dims.N, dims.Hv)
    unread = jnp.zeros_like(jnp.swapaxes(out[..., 0], -1, -2), jnp.float32)
    return out, Sums(unread, unread)
