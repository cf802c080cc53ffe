"""The layer as functions of arrays: project → norm → rotate → append → attend → gate → merge.

The layers of linen and nnx make the parameters, keep the cache between calls, and call these.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax

from flax_mha import masks, sharding
from flax_mha.base import numerics
from flax_mha.cache import Encoded, KeyValues, KVCache
from flax_mha.cache.resolve import CacheLike
from flax_mha.kernels import dot_product_attention
from flax_mha.kernels.call.stored import dequantize
from flax_mha.layer.exclusive import exclude_own
from flax_mha.layer.heads import Heads as Heads
from flax_mha.layer.heads import check_order as check_order
from flax_mha.layer.heads import project_heads as project_heads
from flax_mha.layer.linear import Linear
from flax_mha.layer.settings import Call as Call
from flax_mha.layer.settings import Settings as Settings
from flax_mha.positions.turn import settle
from flax_mha.scores import as_scores
from flax_mha.signatures.attention_fn import run_custom
from flax_mha.taps import internals
from flax_mha.taps.tap import Tap


class Output(NamedTuple):
    """The results of a call.

    Attributes:
      out: the output [*B, T, D_out].
      weights: the weights [*B, N, T, S], before dropout; None unless they were requested.
      cache: the cache with the tokens of this call, or a new one.
      kv: the keys and values of this call, for other layers to attend to.
    """

    out: jax.Array
    weights: jax.Array | None
    cache: KVCache | None
    kv: KeyValues | None


def attend(
    p: Mapping[str, Any], settings: Settings, heads: Heads, call: Call, cache: CacheLike
) -> Output:
    """Run everything after the projections: append, attend, gate, head mask, merge.

    It reads `sinks`, `score_scale` and `out`. `project_heads` describes the arguments.
    """
    tap = call.tap
    q = numerics.scale_heads("score_scale", heads.q, p.get("score_scale"))
    q = tap("q", sharding.constrain(q, sharding.HEADS))
    places: Any = {
        "mask": masks.combine(settings.mask, call.mask), "lengths": call.lengths,
        "order": heads.order,
    }  # fmt: skip
    keys, after = _append(settings, heads._replace(q=q), call, cache, places["mask"])
    options = internals.edit_scores(tap, _options(p, settings, call), q, keys)
    queries: Any = q if heads.turns is None else heads.turns[0].replace(x=q)
    with jax.named_scope("kernel"):
        if keys.has_slots:
            result = keys.attend(queries, **places, **options)
        else:
            arguments = keys.places(q, **places) | options
            kernel = arguments.pop("attention", dot_product_attention)
            result = kernel(queries, keys.key, keys.value, **arguments)
    has_pairs = heads.same_tokens or isinstance(cache, KeyValues)
    z, weights = internals.read_result(tap, result, q, keys, has_pairs, options | places)
    chex.assert_shape(z, (*q.shape[:-2], settings.num_heads, None))  # [*B, T, N, Hv]
    z = tap("z", z)
    if settings.exclusive:
        if not heads.same_tokens:
            raise ValueError(
                "exclusive=True takes each token's own value from its output, so it needs "
                "self-attention, got keys of other tokens (inputs_k or kv); leave them out"
            )
        z = exclude_own(z, dequantize(keys.own()[1]))
    z = z if heads.gate is None else numerics.scaled(z, jax.nn.sigmoid(heads.gate))
    z = numerics.scale_heads("head_mask", z, call.head_mask)
    out = tap.last("out", _merge(p.get("out"), sharding.constrain(z, sharding.HEADS), tap))
    return Output(out, weights, after, keys)


def _append(
    settings: Settings, heads: Heads, call: Call, cache: CacheLike, mask: masks.Mask | None
) -> tuple[KeyValues, KVCache | None]:  # fmt: skip
    """Return the keys and values that the queries attend to, and the cache after the call."""
    q, T, tap, lengths = heads.q, heads.q.shape[-3], call.tap, call.lengths
    after: KVCache | None
    if isinstance(cache, KeyValues):
        cache.check(mask, heads.order)
        return internals.edit_given(tap, q, cache), None
    if isinstance(cache, KVCache) and cache.queries is not None:
        keys, after = cache.counted(T, lengths)
        return internals.edit_given(tap, q, keys), after
    k, v = jax.tree.map(lambda x: sharding.constrain(x, sharding.KV_HEADS), (heads.k, heads.v))
    if isinstance(cache, Encoded):
        dtype = settings.cache and settings.cache.dtype
        keys, after = cache.keep(k, v, dtype or k.dtype, T, lengths)
        return internals.edit_given(tap, q, keys), after
    k, v = tap("k", k), tap("v", v)
    if isinstance(cache, KVCache):
        return cache.extended(*heads.kept(k, v), lengths)
    after = None if cache is None else cache.empty(*heads.kept(k, v), settings.mask)
    k = k if heads.turns is None else heads.turns[1].replace(x=k)
    lengths = lengths if heads.same_tokens else None
    return KeyValues(k, v, lengths, ordered=heads.order is not None), after


def _merge(linear: Linear | None, z: jax.Array, tap: Tap) -> jax.Array:
    """Return the output [*B, T, D] of heads z [*B, T, N, Hv], with the point of their shares."""
    with jax.named_scope("merge"):
        out = jax.lax.collapse(z, z.ndim - 2) if linear is None else linear(z)
    if not isinstance(linear, Linear) or not tap.needs("result"):
        return out
    shares = tap("result", linear.shares(z))
    return linear.join(shares, out.dtype) if tap.is_edited("result") else out


def returned(output: Output, return_weights: bool, return_kv: bool) -> Any:
    """Return the result of a layer's call: the output, in a tuple if more was asked for."""
    if return_kv and output.kv is None:
        raise ValueError(
            "this layer has no keys and values that others could attend to, got return_kv=True; "
            "leave it out, or take MultiHeadAttention"
        )
    asked = ((output.weights, return_weights), (output.kv, return_kv))
    more = [settle(x) for x, is_asked in asked if is_asked]
    return (output.out, *more) if more else output.out


def _options(p: Mapping[str, Any], settings: Settings, call: Call) -> dict[str, Any]:
    """Return the arguments of `dot_product_attention` that say nothing of tokens.

    `attention` is a function to call in its place, if there is one.
    """
    reads = call.tap.reads
    scale = settings.scale if call.scale is None else call.scale
    options: dict[str, Any] = {
        "bias": call.bias, "scores": as_scores(call.scores), "sinks": p.get("sinks"),
        "kernel": settings.kernel, "precision": settings.precision,
        "normalizer": settings.normalizer,
        # A learned scale is in the queries.
        "scale": 1.0 if "score_scale" in p else scale,
        "capture": reads and reads.of_softmax(), "return_weights": call.return_weights,
    }  # fmt: skip
    if call.dropout_rng is not None:
        options |= {
            "dropout_rng": call.dropout_rng, "dropout_rate": settings.dropout_rate,
            "broadcast_dropout": settings.broadcast_dropout,
        }  # fmt: skip
    if call.attention is not None:
        options["attention"] = call.attention
    elif settings.custom_attention is not None:
        options["attention"] = functools.partial(
            run_custom, settings.custom_attention, dtype=settings.dtype,
            force_fp32_for_softmax=settings.force_fp32_for_softmax, module=call.tap.sower,
        )  # fmt: skip
    return options
