"""Splash attention, JAX's sparse flash attention for TPUs.

    out = softmax(softcap(q·kᵀ·scale), over the keys that the mask allows, and the sink)·v

This is `reference` without other score functions and dropout. In half precision the scale
rounds q once more, unless the lse is read.

Memory is O(T + S). Blocks that are empty under a static mask are skipped, forward and backward. In
other blocks the mask is a function of positions and segment ids (see `computed_mask`).

`auto` takes `flex` first, which has more features. This kernel is for plain attention, by its name:
one static mask for all rows and heads, segment ids and lengths, sinks, and a soft cap.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`. Its kernels are called directly, because
its own gradient ignores the lse's cotangent. Dao, "FlashAttention-2", 2023.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info

from flax_mha.base import shapes, trees
from flax_mha.kernels.call import limits
from flax_mha.kernels.call.spec import AttentionSpec, Lowered, Sums, Unsupported, name_result
from flax_mha.kernels.chips import tpus
from flax_mha.kernels.splash import computed_mask
from flax_mha.kernels.splash.segment_ids import Ids
from flax_mha.kernels.xla import softmax
from flax_mha.kernels.xla.tile_plan import Plan
from flax_mha.scores import SoftCap

# Private. `private_jax.NAMES` lists the names used here.
kernels: Any = splash_attention_kernel

_MASKED = kernels.DEFAULT_MASK_VALUE
# A sink with no weight beside a visible score, but all weight beside masked ones. With it, a fully
# masked query has an output and gradients of exactly 0. Without it, splash averages masked values.
_MIN_SINK = _MASKED / 2


def lower(q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> Lowered:
    """Prepare the call, or raise the reason why this kernel does not support it."""
    limits.check(spec, q, k)
    q, k, v, spec = spec.plain(q, k, v)
    dims = shapes.Dims.of(q, k, v)
    if reason := tpus.check(q, k, v) or _check_features(spec):
        raise Unsupported(reason)
    plan = Plan(dims, *tpus.blocks(dims))
    masks = computed_mask.lower(spec, plan)
    if isinstance(masks, str):
        raise Unsupported(masks)
    if spec.platform.not_partitionable:
        raise Unsupported(spec.platform.not_partitionable)
    return Lowered(functools.partial(_attend, q, k, v, spec, *masks, plan))


def _check_features(spec: AttentionSpec) -> str | None:
    """Return the reason against a call's features, or None."""
    if spec.dropout is not None:
        return "has no dropout"
    if spec.precision is not None:
        return f"has no precision setting, got {spec.precision}"
    if isinstance(reason := tpus.precision(None), str):
        return reason
    if len(spec.scores) > 1 or not all(type(mod) is SoftCap for mod in spec.scores):
        names = ", ".join(type(mod).__name__ for mod in spec.scores)
        return f"changes scores by one SoftCap only, got {names}"
    return None


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, mask_ids: Ids | None,
    known: computed_mask.splash.Mask, plan: Plan,
) -> tuple[jax.Array, Sums]:  # fmt: skip
    """Compute attention, with first derivatives only."""
    dims, (T, S) = plan.dims, plan.padded
    q, k = _scale(q, k, spec)
    q, k, v = tpus.heads_first(q, T), tpus.heads_first(k, S), tpus.heads_first(v, S)
    sinks = jnp.full(dims.N, _MIN_SINK, jnp.float32)
    if spec.sinks is not None:
        sinks = jnp.maximum(spec.sinks.astype(jnp.float32), _MIN_SINK)
    ids = None
    if mask_ids is not None:
        ids = kernels.SegmentIds(*(
            jnp.broadcast_to(jnp.pad(x, ((0, 0), (0, to - x.shape[1]))), (len(q), to))
            for x, to in zip(mask_ids, (T, S), strict=True)
        ))  # fmt: skip
    cap = next((mod.cap for mod in spec.scores if isinstance(mod, SoftCap)), None)
    heads = computed_mask.splash.MultiHeadMask([known])
    blocks = plan.block_q, plan.block_k
    # In bfloat16 the kernels compile in the default precision only.
    precision = tpus.precision(None if q.dtype == jnp.float32 else "default")
    pure, name = not spec.user_types(), getattr(precision, "name", "").lower()
    call = SplashCall(heads, blocks, cap, pure, spec.reads_lse, name)
    out, lse = _call(call, q, k, v, sinks, ids)
    out = jnp.swapaxes(out[:, :, : dims.T], 1, 2).reshape(*dims.B, dims.T, dims.N, dims.Hv)
    lse = lse[..., : dims.T].reshape(*dims.B, dims.N, dims.T)
    return out, Sums.of(jnp.where(lse <= _MIN_SINK, -jnp.inf, lse))


def _scale(q: jax.Array, k: jax.Array, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """Return the scaled queries, and keys to match.

    In half precision, scaling rounds queries once more, unless the scale is a power of two. This
    error is smaller than the rounding of the output, but not of a float32 lse. For an exact lse,
    the rounding errors are appended as 2·H more features, rounded in turn.
    """
    exact = q.astype(jnp.float32) * spec.scale
    parts = [exact.astype(q.dtype)]
    is_power = isinstance(spec.scale, float) and math.frexp(spec.scale)[0] == 0.5
    if spec.exact_lse and q.dtype != jnp.float32 and not is_power:
        error = lax.stop_gradient(exact)  # The first part has the full gradient.
        for _ in range(2):
            error -= lax.stop_gradient(parts[-1]).astype(jnp.float32)
            parts.append(error.astype(q.dtype))
    return jnp.concatenate(parts, -1), jnp.concatenate([k] * len(parts), -1)


class SplashCall(NamedTuple):
    """The static part of a call.

    Attributes:
      mask: one mask for all heads.
      blocks: the queries and keys of a block, in all three kernels.
      cap: the soft cap of the scores, or None.
      pure: False if the call holds user-defined functions. See `trees.trace_once`.
      reads_lse: False if the lse is not read, and may be 0.
      precision: JAX's name of the precision of matmuls.
    """

    mask: computed_mask.splash.MultiHeadMask
    blocks: tuple[int, int]
    cap: float | None
    pure: bool
    reads_lse: bool
    precision: str

    def common(self, function: Any) -> dict[str, Any]:
        """Return the arguments that all of splash's kernels share."""
        return {
            "is_mqa": False,
            "mask_value": _MASKED,
            "attn_logits_soft_cap": self.cap,
            "mask_function": function,
            "interpret": False,
        }

    def backward(self) -> dict[str, Any]:
        """Return the arguments that both gradient kernels share."""
        layout = kernels.QKVLayout.HEAD_DIM_MINOR
        layouts = {f"{x}_layout": layout for x in "qkv"}
        return {"bq": self.blocks[0], "bkv": self.blocks[1], **layouts}


@trees.trace_once
@functools.partial(jax.vmap, in_axes=(None, 0, 0, 0, None, 0))
def _outputs(
    call: SplashCall, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array, ids: Any
) -> tuple[jax.Array, jax.Array]:
    """Attend with T and S multiples of the blocks.

    q, scaled, is [B, N, T, ·], k [B, K, S, ·], v [B, K, S, Hv], sinks float32 [N], at least
    `_MIN_SINK`, and ids splash's SegmentIds or None. Returns out [B, N, T, Hv], and lse [B, N, T],
    `_MIN_SINK` for fully masked queries.
    """
    info, function = mask_info.process_mask(call.mask, call.blocks)
    with jax.default_matmul_precision(call.precision):
        result = kernels._splash_attention_forward(
            info, q, k, v, ids, sinks,
            block_sizes=kernels.BlockSizes(*call.blocks),
            residual_checkpoint_name=None,
            save_residuals=call.reads_lse,
            **call.common(function),
        )  # fmt: skip
    if call.reads_lse:
        out, (lse,) = result
        return out, lse
    return result, softmax.unread(result.shape[:-1], result)


def _primal(call: SplashCall, *args: Any) -> Any:
    return _outputs(call, *args)


def _forward(call: SplashCall, *args: Any) -> tuple[Any, Any]:
    result = name_result(*_outputs(call._replace(reads_lse=True), *args))
    return result, (args, result)


def _backward(call: SplashCall, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    args, result = residuals
    dq, dk, dv, dsinks = _gradients(call, *args, result, cotangents)
    return dq, dk, dv, jnp.sum(dsinks, axis=0), None


@trees.trace_once
@functools.partial(jax.vmap, in_axes=(None, 0, 0, 0, None, 0, 0, 0))
def _gradients(
    call: SplashCall, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array, ids: Any,
    result: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Return the gradients of q, k, v and sinks, for one row of the batch."""
    (out, lse), (dout, dlse) = result, cotangents
    # Zero the cotangents of fully masked queries, also without a sink of the call.
    total = jnp.where(lse <= _MIN_SINK, 0.0, 1.0)
    inputs = out, total != 0, lse, total, dout, Sums(lse, dlse)
    dout, lse, share, delta = softmax.gradient_inputs(*inputs)
    lse = lse * share  # NaN where a query sees NaN.
    # d score = p·(dp − δ), with p from the lse, and δ = Σ dout·out − dlse.
    dout = dout.astype(q.dtype)
    args = q, k, v, ids, sinks, lse, dout, delta
    with jax.default_matmul_precision(call.precision):
        info, function = mask_info.process_mask_dkv(call.mask, call.blocks)
        _, dk, dv = kernels._splash_attention_bwd_dkv(
            *args, bkv_compute=call.blocks[1], mask_info=info, use_fused_bwd_kernel=False,
            **call.backward(), **call.common(function),
        )  # fmt: skip
        info, function = mask_info.process_mask(call.mask, call.blocks)
        dq = kernels._splash_attention_bwd_dq(
            *args, mask_info=info, **call.backward(), **call.common(function)
        )
    dsinks = jnp.sum(softmax.sink_gradient(sinks[:, None], lse, share, delta), axis=1)
    return dq, dk, dv, dsinks


_call = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_call.defvjp(_forward, _backward)
