"""Taps of a layer that are more than a tensor: keys of a cache, scores, weights, pairs."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.cache import KeyValues
from flax_mha.kernels import Capture, dot_product_attention, observe
from flax_mha.kernels.call.bind import Options, bind_call
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.call.stored import Stored, dequantize
from flax_mha.masks import combine
from flax_mha.masks.algebra import evaluate
from flax_mha.scores import Bias
from flax_mha.taps.edit import Edit
from flax_mha.taps.tap import Tap


def edit_keys(tap: Tap, q: jax.Array, k: Any, v: Any) -> tuple[Any, Any]:
    """Apply the points of stored keys and values for queries [*B, T, N, H]."""

    def edit(name: str, x: Any) -> Any:
        read = dequantize(x.replace(dtype=q.dtype) if isinstance(x, Stored) else x)
        y = tap.change(name, read, sharding.KV_HEADS, q.shape[-2])
        return y if tap.prefix + name in tap.edits else x

    return edit("k", k), edit("v", v)


def edit_given(tap: Tap, q: jax.Array, source: KeyValues) -> KeyValues:
    """Apply the points of the keys and values of an encoder or another layer."""
    if source.has_slots:
        tap.refuse("kv", "kv of a layer that decodes; edit that layer")
    k, v = edit_keys(tap, q, *source.own())
    return source if source.has_slots else source.replace(key=k, value=v)


def read_result(
    tap: Tap, result: Any, q: jax.Array, source: KeyValues, has_pairs: bool, call: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array | None]:
    """Read the values of a softmax, and the weights on pairs if the source `has_pairs`.

    Returns the heads' outputs of the result, and its weights, or None if they are not asked for.
    """
    if has_pairs and not source.has_slots and tap.pairs:
        _read_pairs(tap, q, source, call)
    out, *more = result if isinstance(result, tuple) else (result,)
    for name, value in (more[-1] if call["capture"] else {}).items():
        tap.sow(name, value)
    return out, more[0] if call["return_weights"] else None


def edit_scores(tap: Tap, call: dict[str, Any], q: jax.Array, source: KeyValues) -> dict[str, Any]:
    """Return the arguments of a call with the edits of its scores and weights."""
    if not tap.is_active:
        return call
    *B, T, N, _ = q.shape
    scores = jax.ShapeDtypeStruct((*B, N, T, source.key.shape[-3]), shapes.wide(q.dtype))
    edit = tap.edit("scores", scores)
    if edit is not None:
        before = () if call["bias"] is None else (Bias(call["bias"]),)
        call = call | {"bias": None, "scores": (*call["scores"], *before, edit)}
    if "attention" in call:
        return call
    edit = tap.edit("weights", scores.update(dtype=q.dtype))
    if edit is None:
        return call
    is_over_keys = any(np.shape(x)[-1:] > (1,) for x in (edit.keep, edit.add))
    if source.window is not None and (is_over_keys or edit.fn is not None):
        raise ValueError(
            f"an edit of {tap.path('attention_weights')} must have no axis of keys and no function "
            f"in a ring buffer, whose slots are not positions, got one; give a cache without it"
        )
    return call | {"attention": functools.partial(_attend_with_weights, edit)}


def _read_pairs(tap: Tap, q: jax.Array, source: Any, call: Mapping[str, Any]) -> None:
    """Read the mean weight of each head on each of `tap.pairs`, as `pairs` by name, [N].

    The mean is over the queries that see such a key. It is NaN if there are none. A sink takes part
    in the softmax, and is in no pair.
    """
    normalizer, attention = call["normalizer"], call.get("attention")
    if attention is not None or normalizer != SOFTMAX:
        got = f"normalizer={normalizer!r}" if normalizer != SOFTMAX else checks.describe(attention)
        raise ValueError(
            f"weights on pairs need a layer whose weights are one softmax of its scores, got {got} "
            f"at {tap.path('attention_pairs')}; read `weights` of this layer instead"
        )
    qkv = (q, source.key, source.value)
    options = {name: x for name, x in call.items() if name in Options.__annotations__}
    options |= source.places(q, call["mask"], call["lengths"], call.get("order"))
    q, k, _, spec = bind_call(*qkv, **options)
    pairs: dict[str, Any] = {}
    for name, x in tap.pairs.items():
        pairs[name] = bind_call(*qkv, **options | {"mask": combine(options["mask"], x)})[3].mask
    tap.sow("pairs", observe.weigh_pairs(q, dequantize(k), spec, pairs))


def _attend_with_weights(
    edit: Edit, q: jax.Array, k: Any, v: Any, *, capture: Capture | None = None,
    return_weights: bool = False, **call: Any,
) -> Any:  # fmt: skip
    """Compute attention with the weights of some heads edited. The others are the kernel's."""
    if call.get("dropout_rng") is not None:
        raise ValueError(
            "an edit of attention_weights needs a call without dropout, got a key for it; give "
            "deterministic=True"
        )
    dims = shapes.attention_dims(q, k, v)
    own = Capture((), edit.heads)
    read = capture if capture is not None and "weights" in capture.what else None
    shown = Capture(()) if return_weights else read or own
    heads = own.indices("heads", dims.N)
    both = np.union1d(heads, shown.indices("heads", dims.N))
    edited = np.searchsorted(both, heads)
    out, values = dot_product_attention(
        q, k, v, capture=Capture(("weights",), both.tolist()), **call
    )
    of_mask: Any = {name: call.get(name) for name in ("mask", "q_positions", "kv_positions")}
    spec = bind_call(q, k, v, **of_mask)[-1]

    def change(
        out: jax.Array, w: jax.Array, v: jax.Array, edit: Edit, spec: AttentionSpec
    ) -> tuple[jax.Array, ...]:
        new, v = edit(w[..., edited, :, :]), jnp.take(v, heads // dims.G, -2)
        if spec.mask is not None:  # Masked pairs stay so.
            allowed = jnp.asarray(evaluate(spec.mask, spec.at(dims)))
            new = jnp.where(observe.pick(allowed, heads, None), new, 0.0)
        z = jnp.einsum("...hts,...shd->...thd", new, v, precision=call.get("precision"))
        out = out.at[..., heads, :].set(z.astype(out.dtype))
        return out, w.at[..., edited, :, :].set(new)

    layouts = (sharding.HEADS, ("batch", None, "length", None))
    out, w = sharding.auto(change, layouts, out, values["weights"], dequantize(v), edit, spec)
    result = [out, w] if return_weights else [out]
    if capture is None:
        return tuple(result)
    # XLA runs the kernel once for both calls.
    captured = dot_product_attention(q, k, v, capture=capture, **call)[-1]
    if read is not None:
        chosen = np.searchsorted(both, read.indices("heads", dims.N))
        captured["weights"] = observe.pick(w, chosen, read.indices("queries", dims.T))
    return (*result, captured)
