"""Edits of stored keys and values, scores and weights, and the captures of a kernel."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import sharding
from flax_mha.base import shapes
from flax_mha.cache import KeyValues
from flax_mha.kernels import Capture, dot_product_attention, observe
from flax_mha.kernels.call.bind import bind_call
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.call.stored import Stored, dequantize
from flax_mha.masks.algebra import evaluate
from flax_mha.scores import Bias
from flax_mha.taps.tap import Edit, Tap, at_softmax


def edit_given(tap: Tap, q: jax.Array, source: KeyValues) -> KeyValues:
    """Return the keys and values of an encoder or another layer after their edits."""
    if not tap.is_active:
        return source
    if source.has_slots:
        tap.refuse("kv", "kv of a layer that decodes; edit that layer")

    def edit(name: str, x: Any) -> Any:
        y = tap(name, dequantize(x.replace(dtype=q.dtype) if isinstance(x, Stored) else x))
        return y if tap.is_edited(name) else x

    k, v = map(edit, "kv", source.own())
    return source if source.has_slots else source.replace(key=k, value=v)


def read_result(
    tap: Tap, result: Any, q: jax.Array, source: KeyValues, has_pairs: bool, call: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array | None]:
    """Sow the captured values of a kernel's result, and return its output and weights or None.

    `has_pairs` is True if queries and keys are of the same tokens.
    """
    if at_softmax.value is not None and has_pairs and not source.has_slots:
        at_softmax.value(tap, q, source, call)
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
    heads = Capture((), edit.heads).indices("heads", dims.N)
    is_captured = capture is not None and "weights" in capture.what
    is_whole = return_weights or is_captured  # Else only the edited heads' weights are computed.
    edited = heads if is_whole else np.arange(len(heads))
    computed = Capture(("weights",), None if is_whole else edit.heads)
    out, values = dot_product_attention(q, k, v, capture=computed, **call)
    of_mask: Any = {name: call.get(name) for name in ("mask", "q_positions", "kv_positions")}
    spec = bind_call(q, k, v, **of_mask)[-1]

    def change(
        out: jax.Array, w: jax.Array, v: jax.Array, edit: Edit, spec: AttentionSpec
    ) -> tuple[jax.Array, ...]:
        new, v = edit(w[..., edited, :, :]), jnp.take(v, heads // dims.G, -2)
        if spec.mask is not None:  # Masked pairs keep a weight of 0.
            allowed = jnp.asarray(evaluate(spec.mask, spec.at(dims)))
            new = jnp.where(observe.pick(allowed, heads, None), new, 0.0)
        z = jnp.einsum("...hts,...shd->...thd", new, v, precision=call.get("precision"))
        out = out.at[..., heads, :].set(z.astype(out.dtype))
        return out, w.at[..., edited, :, :].set(new)

    layouts = (sharding.HEADS, ("batch", None, "length", None))
    out, w = sharding.auto(change, layouts, out, values["weights"], dequantize(v), edit, spec)
    result = (out, w) if return_weights else (out,)
    if capture is None:
        return result
    # XLA runs the kernel once for both calls.
    captured = dot_product_attention(q, k, v, capture=capture, **call)[-1]
    if is_captured:
        captured["weights"] = observe.pick(w, *capture.chosen(dims))
    return *result, captured
