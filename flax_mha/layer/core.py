"""The layer as functions of arrays: project → norm → position → cache → kernel → merge.

There are no modules here, of linen or of nnx: parameters are a dict, settings a dataclass, and the
cache goes in and comes out. A layer of either library makes the parameters, keeps the cache between
calls, and calls these functions.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array
from flax_mha.cache import CacheConfig, KVCache, Memory, sources
from flax_mha.cache.sources import KV, Shared
from flax_mha.kernels import dot_product_attention
from flax_mha.kernels.observe import Captured
from flax_mha.layer import attention_fn, padding
from flax_mha.layer.heads import norm, project, turn
from flax_mha.layer.linear import Linear
from flax_mha.layer.settings import Call as Call
from flax_mha.layer.settings import Settings as Settings
from flax_mha.layer.settings import captured as captured
from flax_mha.scores import as_scores

# What a layer attends to beside its inputs, or is to make of them.
Source: TypeAlias = KVCache | Memory | CacheConfig | Shared | None


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
    p: Mapping[str, Any],
    settings: Settings,
    x_q: jax.Array,
    x_k: jax.Array | None,
    x_v: jax.Array | None,
    call: Call,
    cache: Source = None,
) -> Output:
    """Attend from x_q to x_k and x_v.

    Args:
      p: the parameters by name, as `standard.Attention.table` lists them: `query`, `key`, `value`,
        `out` and `output_gate` as `Linear`, the norms `query_ln` and `key_ln` as functions, the
        arrays `sinks` and `score_scale`. All but `query` may be missing.
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
    heads = project_heads(p, settings, x_q, x_k, x_v, call, cache)
    return attend(p, settings, heads, call, cache)


class Heads(NamedTuple):
    """Inputs as the heads see them, before attention.

    Attributes:
      q: [*B, T, N, H], normed and turned.
      k: [*B, S, K, H], or None, to attend to what the cache holds.
      v: [*B, S, K, Hv], likewise.
      gate: what the heads' outputs are scaled by, before the sigmoid; or None.
      order: where the tokens stand, see `Call`.
      is_self_attention: whether keys are of the queries' tokens.
      beside: the products of projections that were joined with those.
    """

    q: jax.Array
    k: Any
    v: Any
    gate: jax.Array | None = None
    order: Array | None = None
    is_self_attention: bool = True
    beside: tuple[jax.Array, ...] = ()


def project_heads(
    p: Mapping[str, Any], settings: Settings, x_q: jax.Array, x_k: jax.Array | None,
    x_v: jax.Array | None, call: Call, cache: Source, beside: Sequence[Linear] = (),
) -> Heads:  # fmt: skip
    """Return queries, keys and values of the heads: the first half of `attention`.

    Args:
      p: see `attention`, as all that are not named here.
      settings: see there.
      x_q: see there.
      x_k: see there.
      x_v: see there.
      call: see there.
      cache: see there.
      beside: more projections of x_q, each to [N, ·], that are computed with the others.
    """
    is_self_attention = x_k is x_q
    whole = isinstance(cache, KV) or (is_self_attention and cache is None)
    order = check_order(call.order, whole, x_q.shape[-2])
    x_q, x_k, x_v = padding.cleared_inputs(x_q, x_k, x_v, call.lengths, order)
    with jax.named_scope("project"):  # These names are what profiles show.
        q, k, v, gate, products = project(p, x_q, x_k, x_v, beside)
    norms_after = settings.qk_norm is not None and settings.qk_norm.after_rotary
    if not norms_after:
        q, k = norm(p, q, k)
    with jax.named_scope("rotate"):
        q, k = turn(settings.rotary, q, k, call.positions, order, cache)
    if norms_after:
        q, k = norm(p, q, k)
    return Heads(q, k, v, gate, order, is_self_attention, products)


def attend(
    p: Mapping[str, Any], settings: Settings, heads: Heads, call: Call, cache: Source
) -> Output:
    """Return what follows the projections, in `attention` and in layers that have others.

    Args:
      p: of which only `sinks`, `score_scale` and `out` are read.
      settings: see `Settings`.
      heads: see `Heads`.
      call: see `Call`.
      cache: see `attention`.
    """
    q = sharding.constrain(shapes.scale_heads(heads.q, p.get("score_scale")), sharding.HEADS)
    arguments = _arguments(p, settings, call)
    source, cache = _open(p, settings, heads, q, arguments["mask"], call, cache)
    with jax.named_scope("kernel"):
        if isinstance(source, KV):
            attention = arguments.pop("attention", dot_product_attention)
            arguments["mask"] = source.mask_padding(q, arguments["mask"], call.lengths)
            places = {"q_positions": heads.order, "kv_positions": heads.order}
            result = attention(q, source.key, source.value, **places, **arguments)
        else:
            result = source.attend(q, lengths=call.lengths, **arguments)
    x, *more = result if isinstance(result, tuple) else (result,)
    x = x if heads.gate is None else x * jax.nn.sigmoid(heads.gate).astype(x.dtype)
    x = sharding.constrain(shapes.scale_heads(x, call.head_mask), sharding.HEADS)
    captures = more[-1] if call.capture else {}
    with jax.named_scope("merge"):
        out = merge(p.get("out"), x)
    return Output(out, more[0] if call.return_weights else None, captures, cache, source)


def _open(
    p: Mapping[str, Any], settings: Settings, heads: Heads, q: jax.Array, mask: Any, call: Call,
    cache: Source,
) -> tuple[Shared, KVCache | Memory | None]:  # fmt: skip
    """Return what queries attend to, and the cache after this call."""
    if isinstance(cache, Shared):
        kernel = p["out"].kernel if "out" in p else None
        sources.check(cache, q, None if kernel is None else kernel.shape[-2], mask, heads.order)
        return cache, None
    k, v = heads.k, heads.v
    if k is not None:
        k, v = (sharding.constrain(x, sharding.KV_HEADS) for x in (k, v))
    if isinstance(cache, KVCache):
        return cache.extended(k, v, call.lengths)
    if isinstance(cache, CacheConfig):
        own = heads.is_self_attention
        cache = cache.empty(k, v, settings.mask) if own else cache.memory(k, v)
    if isinstance(cache, Memory):
        k, v = cache.stored()
    lengths = call.lengths if heads.is_self_attention else None
    return KV(k, v, lengths, heads.order is not None), cache


def returned(output: Output, return_weights: bool, return_kv: bool) -> Any:
    """Return the result of a layer's call: the output, in a tuple if more was asked for."""
    checks.flag("return_kv", return_kv)
    if return_kv and output.kv is None:
        raise ValueError(
            "this layer has no keys and values that others could attend to, got return_kv=True; "
            "leave it out, or take MultiHeadAttention"
        )
    asked = ((output.weights, return_weights), (output.kv, return_kv))
    more = [x for x, is_asked in asked if is_asked]
    return (output.out, *more) if more else output.out


def merge(out: Linear | None, x: jax.Array) -> jax.Array:
    """Return the heads' outputs [*B, T, N, Hv] as [*B, T, D_out], or one after the other."""
    return jax.lax.collapse(x, x.ndim - 2) if out is None else out(x)


def _arguments(p: Mapping[str, Any], settings: Settings, call: Call) -> dict[str, Any]:
    """Return the arguments of attention beside queries, keys and values."""
    scale = settings.scale if call.scale is None else call.scale
    arguments: dict[str, Any] = {
        "mask": masks.combine(settings.mask, call.mask), "bias": call.bias,
        "scores": as_scores(call.scores), "sinks": p.get("sinks"), "kernel": settings.kernel,
        "precision": settings.precision, "normalizer": settings.normalizer,
        # One that is learned is in the queries.
        "scale": 1.0 if "score_scale" in p else scale,
        "capture": call.capture, "return_weights": call.return_weights,
    }  # fmt: skip
    if call.dropout_rng is not None:
        arguments |= {
            "dropout_rng": call.dropout_rng, "dropout_rate": settings.dropout_rate,
            "broadcast_dropout": settings.broadcast_dropout,
        }  # fmt: skip
    if call.attention is not None:
        arguments["attention"] = call.attention
    elif settings.attention_fn is not None:
        arguments["attention"] = functools.partial(
            attention_fn.run, settings.attention_fn, dtype=settings.dtype,
            force_fp32_for_softmax=settings.force_fp32_for_softmax, module=call.sower,
        )  # fmt: skip
    return arguments


def check_order(order: Array | None, whole: bool, length: int) -> Array | None:
    """Return the `order` of a call, if it fits."""
    if order is None:
        return None
    if not whole:
        raise ValueError(
            "order says where the tokens of self-attention stand, all of them in one call; got it "
            "in decoding or with inputs_k; leave it out"
        )
    return shapes.check_order(order, length)
