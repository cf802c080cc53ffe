"""The layer as functions of arrays: project → norm → position → cache → kernel → merge.

There are no modules here, of linen or of nnx: weights are a tree, settings a frozen dataclass, and
the cache goes in and comes out. A layer of either library makes the parameters, keeps the cache
between calls, and calls `attention`.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array
from flax_mha.cache import CacheConfig, KVCache, Memory, sources
from flax_mha.cache.sources import KV, Shared
from flax_mha.kernels.observe import Captured
from flax_mha.layer import attention_fn, padding
from flax_mha.layer.heads import Weights as Weights
from flax_mha.layer.heads import normed, project, turned
from flax_mha.layer.linear import Linear
from flax_mha.layer.settings import Call as Call
from flax_mha.layer.settings import Settings as Settings
from flax_mha.layer.settings import captured as captured
from flax_mha.scores import as_scores

# What a layer attends to beside its inputs, or is to make of them.
Held: TypeAlias = KVCache | Memory | CacheConfig | Shared | None


class Output(NamedTuple):
    """What comes of a call.

    Attributes:
      out: [*B, T, D_out].
      weights: [*B, N, T, S], as before dropout, if they were asked for.
      captured: what `capture` names.
      cache: with the tokens of this call, or made for such.
      kv: the keys and values that were attended to, for others to attend to.
    """

    out: jax.Array
    weights: jax.Array | None
    captured: Mapping[Captured, jax.Array]
    cache: KVCache | Memory | None
    kv: Shared | None


def attention(
    weights: Weights,
    settings: Settings,
    x_q: jax.Array,
    x_k: jax.Array | None,
    x_v: jax.Array | None,
    call: Call,
    cache: Held = None,
) -> Output:
    """Attends from x_q to x_k and x_v.

    Args:
      weights: see `Weights`.
      settings: see `Settings`.
      x_q: [*B, T, D].
      x_k: [*B, S, D']; x_q in self-attention; None to attend to what the cache holds.
      x_v: [*B, S, D''], or None likewise.
      call: see `Call`.
      cache: of the tokens before these, which are appended; or an encoder's, or keys and values of
        another layer, to attend to. Of a `CacheConfig` one is made: in self-attention with room for
        as many tokens as these, of which it keeps none; in cross-attention with these keys and
        values.
    """
    heads = projected(weights, settings, x_q, x_k, x_v, call, cache)
    return attend(weights, settings, heads, call, cache)


class Projected(NamedTuple):
    """What inputs become before attention.

    Attributes:
      q: [*B, T, N, H], normed and turned.
      k: [*B, S, K, H], or None, to attend to what the cache holds.
      v: [*B, S, K, Hv], likewise.
      gate: what the heads' outputs are scaled by, before the sigmoid; or None.
      order: where the tokens stand, see `Call`.
      itself: whether keys are of the queries' tokens.
      beside: the products of `Weights.beside`.
    """

    q: jax.Array
    k: Any
    v: Any
    gate: jax.Array | None = None
    order: Array | None = None
    itself: bool = True
    beside: tuple[jax.Array, ...] = ()


def projected(
    weights: Weights, settings: Settings, x_q: jax.Array, x_k: jax.Array | None,
    x_v: jax.Array | None, call: Call, cache: Held,
) -> Projected:  # fmt: skip
    """The first half of `attention`, up to the cache; arguments as there."""
    itself = x_k is x_q
    whole = isinstance(cache, KV) or (itself and cache is None)
    order = ordered(call.order, whole, x_q.shape[-2])
    x_q, x_k, x_v = padding.cleared_inputs(x_q, x_k, x_v, call.lengths, order)
    with jax.named_scope("project"):  # These names are what profiles show.
        q, k, v, gate, beside = project(weights, x_q, x_k, x_v)
    turned_first = settings.qk_norm is not None and settings.qk_norm.after_rotary
    if not turned_first:
        q, k = normed(weights, q, k)
    with jax.named_scope("rotate"):
        q, k = turned(settings.rotary, q, k, call.positions, order, cache)
    if turned_first:
        q, k = normed(weights, q, k)
    return Projected(q, k, v, gate, order, itself, beside)


def attend(
    weights: Weights, settings: Settings, heads: Projected, call: Call, cache: Held
) -> Output:
    """What follows the projections, in `attention` and in layers that have others.

    Args:
      weights: of which only sinks, scale and out are read.
      settings: see `Settings`.
      heads: see `Projected`.
      call: see `Call`.
      cache: see `attention`.
    """
    q, k, v, gate, order, itself, _ = heads
    q = sharding.constrain(shapes.scale_heads(q, weights.scale), sharding.HEADS)
    if k is not None:
        k, v = (sharding.constrain(x, sharding.KV_HEADS) for x in (k, v))
    if isinstance(cache, CacheConfig) and not itself:
        cache = cache.memory(k, v)
    if isinstance(cache, Memory):
        k, v = cache.stored()
    rest = _arguments(weights, settings, call)
    kv: Shared
    if isinstance(cache, Shared):
        kv, cache = cache, None
        kernel = None if weights.out is None else weights.out.kernel
        Hv = None if kernel is None else kernel.shape[-2]
        sources.check(kv, q, Hv, rest["mask"], order)
    elif isinstance(cache, KVCache):
        kv, cache = cache.extended(k, v, call.lengths)
    else:
        kv = KV(k, v, call.lengths if itself else None, order is not None)
    if isinstance(cache, CacheConfig):
        cache = cache.empty(k, v, settings.mask)
    with jax.named_scope("kernel"):
        found = kv.attend(q, lengths=call.lengths, order=order, **rest)
    x, *extras = found if isinstance(found, tuple) else (found,)
    x = x if gate is None else x * jax.nn.sigmoid(gate).astype(x.dtype)
    x = sharding.constrain(shapes.scale_heads(x, call.head_mask), sharding.HEADS)
    seen = extras[-1] if call.capture else {}
    with jax.named_scope("merge"):
        out = merged(weights.out, x)
    return Output(out, extras[0] if call.return_weights else None, seen, cache, kv)


def returned(found: Output, return_weights: bool, return_kv: bool) -> Any:
    """What a layer's call returns of it."""
    checks.flag("return_kv", return_kv)
    if return_kv and found.kv is None:
        raise ValueError(
            "this layer has no keys and values that others could attend to, got return_kv=True; "
            "leave it out, or take MultiHeadAttention"
        )
    asked = ((found.weights, return_weights), (found.kv, return_kv))
    more = [x for x, wanted in asked if wanted]
    return (found.out, *more) if more else found.out


def merged(out: Linear | None, x: jax.Array) -> jax.Array:
    """The heads' outputs [*B, T, N, Hv] as [*B, T, D_out], or one after the other."""
    return jax.lax.collapse(x, x.ndim - 2) if out is None else out(x)


def _arguments(weights: Weights, settings: Settings, call: Call) -> dict[str, Any]:
    """What computes attention, and what it is given beside queries, keys and values."""
    found: dict[str, Any] = {
        "mask": masks.combine(settings.mask, call.mask), "bias": call.bias,
        "scores": as_scores(settings.scores) + as_scores(call.scores),
        "sinks": weights.sinks, "kernel": settings.kernel, "precision": settings.precision,
        "normalizer": settings.normalizer,
        # One that is learned is in the queries.
        "scale": settings.scale if weights.scale is None else 1.0,
        "capture": call.capture, "return_weights": call.return_weights,
    }  # fmt: skip
    if call.dropout_rng is not None:
        found |= {
            "dropout_rng": call.dropout_rng, "dropout_rate": settings.dropout_rate,
            "broadcast_dropout": settings.broadcast_dropout,
        }  # fmt: skip
    if call.attention is not None:
        found["attention"] = call.attention
    elif settings.attention_fn is not None:
        found["attention"] = functools.partial(
            attention_fn.run, settings.attention_fn, dtype=settings.dtype,
            force_fp32_for_softmax=settings.force_fp32_for_softmax, module=call.sower,
        )  # fmt: skip
    return found


def ordered(order: Array | None, whole: bool, length: int) -> Array | None:
    """The `order` of a call, if it fits."""
    if order is None:
        return None
    if not whole:
        raise ValueError(
            "order says where the tokens of self-attention stand, all of them in one call; got it "
            "in decoding or with inputs_k; leave it out"
        )
    return shapes.check_order(order, length)
