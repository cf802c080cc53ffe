"""Dot-product attention on whichever kernel suits the call.

A call goes straight through: it is checked and brought into one form (`bind`, `spec`), divided over
the mesh (`shards`), taken by the first kernel that can (`choose`), and computed.
"""

from typing import Any, Literal, Unpack, overload

import chex
import jax

from flax_mha.base import checks, shapes
from flax_mha.base.arguments import check_known, names_of, with_arguments_of
from flax_mha.base.coordinates import Array
from flax_mha.kernels import choose, observe
from flax_mha.kernels.bind import Keyed, Options, bind_call
from flax_mha.kernels.choose import KERNELS as KERNELS
from flax_mha.kernels.choose import Explanation as Explanation
from flax_mha.kernels.choose import KernelName as KernelName
from flax_mha.kernels.derivatives import any_derivative as any_derivative
from flax_mha.kernels.mesh import shards
from flax_mha.kernels.mesh.devices import current_platform
from flax_mha.kernels.normalizers import SOFTMAX
from flax_mha.kernels.observe import Capture as Capture
from flax_mha.kernels.spec import Platform as Platform
from flax_mha.kernels.stored import dequantize

_WEIGHTS = Capture(("weights",))


@overload
def dot_product_attention(
    q: Array, k: Keyed, v: Keyed, *, kernel: KernelName = ..., return_weights: Literal[False] = ...,
    return_residuals: Literal[False] = ..., capture: None = ..., **call: Unpack[Options],
) -> jax.Array: ...  # fmt: skip
@overload
def dot_product_attention(
    q: Array, k: Keyed, v: Keyed, *, kernel: KernelName = ..., return_weights: bool = ...,
    return_residuals: bool = ..., capture: Capture | None = ..., **call: Unpack[Options],
) -> Any: ...  # fmt: skip
@with_arguments_of(bind_call)
def dot_product_attention(
    q: Array,
    k: Keyed,
    v: Keyed,
    *,
    kernel: KernelName = "auto",
    return_weights: bool = False,
    return_residuals: bool = False,
    capture: Capture | None = None,
    **call: Unpack[Options],
) -> Any:
    """Scaled dot-product attention.

        out = softmax(scores(q·kᵀ·scale) + bias, over the keys that the mask allows)·v

    A query that may see no key gives exactly 0, with zero weights and gradients. What a masked
    key or value holds, NaN included, has no effect. The softmax is computed in float32 at least.

    Dimensions: B batch (any number of axes), T queries, S keys, N query heads, K key/value heads
    (N a multiple of K: query head n reads key head n // (N/K)), H head features.

    Args:
      q: [*B, T, N, H], floating point.
      k: [*B, S, K, H].
      v: [*B, S, K, Hv]. The three are promoted to one dtype; `Stored` keys and values, of a
        cache, are read in that of q.
      mask: a `flax_mha.masks.Mask`, or an array of bools (or of 1 and 0) that broadcasts to
        [*B, N, T, S], True where a query may see a key: one of two axes is [T, S], one of three
        [N, T, S]. A mask of keys [*B, S] is `masks.Keys(array)`.
      bias: added to the scores, after `scores`; broadcasts to [*B, N, T, S].
      scores: functions of the scores, applied in order; see `flax_mha.scores`.
      sinks: [N], one more score a head, that takes weight in the softmax and gives nothing.
      scale: of the scores (default: 1/√H).
      dropout_rate: the share of weights set to 0, the others scaled to keep the expectation.
      dropout_rng: a JAX key, needed if dropout_rate > 0.
      broadcast_dropout: one dropout pattern for all rows of the batch and heads.
      q_positions: int [T] or [*B, T], where the queries stand for masks, scores and dropout; a
        number stands for positions that count from it (default: 0). Numbers, and arrays that are
        not traced, are known before tracing, so that kernels can skip what a mask excludes.
      kv_positions: int [S] or [*B, S], or a number, likewise.
      kernel: the name of a kernel, or "auto" (see `explain`). Forward mode (`jax.jvp`) needs
        "checkpointed" or "reference", and so do gradients of gradients under masks of traced
        arrays; "auto" takes these within `flax_mha.kernels.any_derivative()`. Of a sequence
        divided over a mesh, the way to the other devices' keys: "ulysses", "ring" or "all_gather",
        alone or before a kernel, as in "ring:blockwise"; on one device that kernel alone.
      precision: of the matrix products, see `jax.lax.Precision`.
      normalizer: how scores become weights: "softmax", "sigmoid" or "softpick", see
        `flax_mha.kernels.reference`; without a softmax there is no lse, nor what comes of it
        (weights and entropy beside the output).
      return_weights: also return the weights [*B, N, T, S], as before dropout.
      return_residuals: also return lse [*B, N, T] in float32, the logarithm of the sum of the
        exponentials of the scores (−∞ for a query that sees nothing).
      capture: also return a dict of what it names, such as `Capture(("entropy", "max_logit"))`.
        The output is the same to the bit.

    Returns:
      out [*B, T, N, Hv] in the promoted dtype of q, k and v; or a tuple of it, the weights, the
      lse and what was captured, as asked for.

    Raises:
      ValueError: if shapes do not fit, or the named kernel refuses the call.
      TypeError: if a dtype is not supported, or the kernel lacks a derivative that is asked for.

    Sources: Vaswani et al., "Attention Is All You Need", 2017; Ainslie et al., "GQA", 2023.
    """
    check_known("dot_product_attention", call, ARGUMENTS)
    q, k, v, spec = bind_call(q, k, v, **call)
    checks.flag("return_weights", return_weights)
    checks.flag("return_residuals", return_residuals)
    capture = observe.as_capture(capture)
    _check_lse(spec.normalizer, return_weights, return_residuals, capture)
    _, name = choose.parse_kernel(kernel)
    reads = return_weights or return_residuals or bool(capture)
    asked = spec.replace(invalid=None, reads_lse=reads, exact_lse=return_residuals)
    division = shards.Division.of(q, k)
    if division is None:
        out, lse = choose.run(name, current_platform(), q, k, v, asked)
    else:
        out, lse = shards.run(kernel, division, q, k, v, asked)
    out, lse = spec.nan_where_invalid(out), spec.nan_lse_where_invalid(lse)
    *B, T, N, _ = q.shape
    chex.assert_shape(out, (*B, T, N, v.shape[-1]))
    chex.assert_shape(lse, (*B, N, T))
    extras: list[Any] = []
    if return_weights:
        extras.append(observe.observe(q, dequantize(k), lse, spec, _WEIGHTS)["weights"])
    if return_residuals:
        extras.append(lse)
    if capture:
        extras.append(observe.observe(q, dequantize(k), lse, spec, capture))
    return (out, *extras) if extras else out


# The names of its arguments, for functions that pass them on.
ARGUMENTS = names_of(dot_product_attention)


def _check_lse(normalizer: str, weights: bool, lse: bool, capture: Capture | None) -> None:
    """Refuse what comes of the lse where there is no softmax."""
    names = set() if capture is None else {*capture.what} - {"max_logit"}
    names |= {"weights"} if weights else set()
    names |= {"lse"} if lse else set()
    if normalizer != SOFTMAX and names:
        raise ValueError(
            f"{', '.join(sorted(names))} are those of a softmax, got normalizer={normalizer!r}; "
            f"leave them out"
        )


@with_arguments_of(bind_call)
def explain(
    q: Array | jax.ShapeDtypeStruct,
    k: Keyed | jax.ShapeDtypeStruct,
    v: Keyed | jax.ShapeDtypeStruct,
    *,
    kernel: KernelName = "auto",
    return_weights: bool = False,
    return_residuals: bool = False,
    capture: Capture | None = None,
    platform: Platform | None = None,
    **call: Unpack[Options],
) -> Explanation:
    """Tells which kernel `dot_product_attention` would take, without running anything.

    Args:
      q: as for `dot_product_attention`, or its `jax.ShapeDtypeStruct`.
      k: likewise.
      v: likewise.
      kernel: likewise.
      return_weights: likewise; every kernel can.
      return_residuals: likewise; every kernel can.
      capture: likewise; every kernel can.
      platform: what the call would run on, which need not be here, such as `Platform("tpu")` or
        `Platform("gpu", "NVIDIA H200", cudnn=(9, 20, 0))` of flax_mha (default: where it is now).
      **call: its other arguments.

    Returns:
      The choice and the refusals; `print` shows a table.

    Raises:
      ValueError, TypeError: if the call itself is invalid, or the kernel unknown.
    """
    check_known("explain", call, ARGUMENTS)
    checks.flag("return_weights", return_weights)
    checks.flag("return_residuals", return_residuals)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, jax.ShapeDtypeStruct):
            checks.real(name, x.dtype)
        else:
            checks.floating(name, x)
    capture = observe.as_capture(capture)
    _, name = choose.parse_kernel(kernel)

    def trace(q: Array, k: Keyed, v: Keyed) -> Explanation:
        q, k, v, spec = bind_call(q, k, v, **call)
        spec = spec.replace(invalid=None)
        if capture:
            capture.chosen(shapes.Dims.of(q, k, v))
        division = shards.Division.of(q, k)
        if division is None:
            return choose.explain(name, platform or current_platform(), q, k, v, spec)
        return shards.explain(kernel, division, q, k, v, spec, platform)

    explanation: Explanation = jax.eval_shape(trace, q, k, v)
    return explanation
