"""The layer as functions of arrays: project → norm → position → cache → kernel → merge.

Parameters are a dict, settings a dataclass, and the cache goes in and comes out. The layers of
linen and nnx make the parameters, keep the cache between calls, and call these functions.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.ad_checkpoint import checkpoint_name

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes
from flax_mha.cache import KVCache, Memory, sources
from flax_mha.cache.sources import KeyValue, NewMemory, Shared
from flax_mha.cache.sources import Source as Source
from flax_mha.kernels import dot_product_attention
from flax_mha.layer.heads import Heads as Heads
from flax_mha.layer.heads import check_order as check_order
from flax_mha.layer.heads import project_heads as project_heads
from flax_mha.layer.linear import Linear
from flax_mha.layer.settings import Call as Call
from flax_mha.layer.settings import Settings as Settings
from flax_mha.scores import as_scores
from flax_mha.signatures import custom_attention
from flax_mha.taps import heads as heads_tap
from flax_mha.taps.tap import FEATURES, Tap


class Output(NamedTuple):
    """The results of a call.

    Attributes:
      out: the output [*B, T, D_out].
      weights: the weights [*B, N, T, S], as before dropout, or None if not asked for.
      cache: the cache with the tokens of this call, or a new one.
      kv: the keys and values of this call, for other layers to attend to.
    """

    out: jax.Array
    weights: jax.Array | None
    cache: KVCache | Memory | None
    kv: Shared | None


def attention(
    p: Mapping[str, Any], settings: Settings, x_q: jax.Array, x_k: jax.Array | None,
    x_v: jax.Array | None, call: Call, cache: Source = None,
) -> Output:  # fmt: skip
    """Attend from x_q to x_k and x_v.

    Args:
      p: the parameters by name, as `standard.Attention.table` lists them: `query`, `key`, `value`,
        `out` and `output_gate` as `Linear`, the norms `query_ln` and `key_ln` as functions, the
        arrays `sinks` and `score_scale`. All but `query` may be missing.
      settings: the settings of the layer.
      x_q: the inputs of the queries [*B, T, D].
      x_k: the inputs of the keys [*B, S, D']; None for x_q, or if the source has keys.
      x_v: the inputs of the values [*B, S, D''] (default: those of the keys).
      call: the other arguments.
      cache: the source, as `sources.resolve_call` returns it: a cache, to which these tokens are
        appended; the `CacheConfig` of an empty one to make, with room for as many tokens as these;
        keys and values of an encoder, or a `NewMemory` to keep these for later; keys and values of
        another layer; or None.
    """
    heads = project_heads(p, settings, x_q, x_k, x_v, call, cache)
    return attend(p, settings, heads, call, cache)


def attend(
    p: Mapping[str, Any], settings: Settings, heads: Heads, call: Call, cache: Source
) -> Output:
    """Run everything after the projections: cache, kernel, gate, head mask, output projection.

    Arguments are as in `attention`, with `heads` in place of the inputs. Of the parameters
    `sinks`, `score_scale` and `out` are read.
    """
    q, k, v = heads.q, heads.k, heads.v
    q = shapes.scale_heads(q, p["score_scale"]) if "score_scale" in p else q
    q = sharding.constrain(q, sharding.HEADS)
    k, v = jax.tree.map(lambda x: sharding.constrain(x, sharding.KV_HEADS), (k, v))
    q = call.tap("q", q, sharding.HEADS)
    if isinstance(cache, KVCache):
        k, v = heads_tap.edit_keys(call.tap, q, k, v)
    q, k, v = (checkpoint_name(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    arguments = _arguments(p, settings, call)
    is_shared = isinstance(cache, Shared)
    if isinstance(cache, Shared):
        kernel = p["out"].kernel if "out" in p else None
        Hv = None if kernel is None else kernel.shape[-2]
        sources.check_source(cache, q, Hv, arguments["mask"], heads.order)
    source, cache = _open_source(cache, heads._replace(q=q, k=k, v=v), settings.mask, call.lengths)
    if call.tap.is_active:
        source = heads_tap.edit_source(call.tap, q, source, is_shared)
        heads_tap.edit_scores(call.tap, arguments, q, source)
    with jax.named_scope("kernel"):
        if isinstance(source, KeyValue):
            attention = arguments.pop("attention", dot_product_attention)
            arguments["mask"] = source.mask_padding(q, arguments["mask"], call.lengths)
            q_positions = heads.order if source.q_positions is None else source.q_positions
            places = {"q_positions": q_positions, "kv_positions": heads.order}
            result = attention(q, source.key, source.value, **places, **arguments)
            if heads.same_tokens or is_shared:
                qkv = (q, source.key, source.value)
                heads_tap.read_pairs(call.tap, attention, qkv, arguments | places)
        else:
            result = source.attend(q, lengths=call.lengths, **arguments)
    x, *more = result if isinstance(result, tuple) else (result,)
    chex.assert_shape(x, (*q.shape[:-2], settings.num_heads, None))  # [*B, T, N, Hv]
    x = call.tap("z", x, sharding.HEADS)
    x = x if heads.gate is None else x * jax.nn.sigmoid(heads.gate).astype(x.dtype)
    x = x if call.head_mask is None else shapes.scale_heads(x, call.head_mask)
    x = sharding.constrain(x, sharding.HEADS)
    with jax.named_scope("merge"):
        out = p["out"](x) if "out" in p else jax.lax.collapse(x, x.ndim - 2)
    for name, value in (more[-1] if arguments["capture"] else {}).items():
        call.tap.sow(name, value)
    out = _edit_result(call.tap, p.get("out"), x, out)
    out = checkpoint_name(call.tap.last("out", out), "out")
    chex.assert_shape(out, (*q.shape[:-2], None))  # [*B, T, D]
    return Output(out, more[0] if call.return_weights else None, cache, source)


def _open_source(
    cache: Source, heads: Heads, mask: masks.MaskLike | None, lengths: jax.Array | None
) -> tuple[Shared, KVCache | Memory | None]:
    """Return the keys and values that a call attends to, and the cache after it."""
    k, v = heads.k, heads.v
    if isinstance(cache, Shared):
        return cache, None
    if isinstance(cache, KVCache):
        return cache.extended(*heads.kept(k, v), lengths)
    if isinstance(cache, NewMemory):
        memory = Memory.of(k, v, jnp.dtype(cache.config.dtype or k.dtype))
        if cache.replaced is None:
            # As with an empty cache, the first call makes room, and its tokens are not counted.
            length = jnp.zeros(k.shape[:-3], jnp.int32)
            return KeyValue(*memory.stored()), memory.replace(length=length)
        cache = memory.replace(length=cache.replaced.length)
    if isinstance(cache, Memory):
        T = heads.q.shape[-3]
        source = KeyValue(*cache.stored(), q_positions=cache.next_positions(T))
        return source, cache.replace(length=cache.length + cache.count(T, lengths))
    # The mask determines the window of a ring buffer.
    new = None if cache is None else cache.empty(*heads.kept(k, v), mask)
    return KeyValue(k, v, lengths if heads.same_tokens else None, heads.order is not None), new


def _edit_result(tap: Tap, linear: Linear | None, x: jax.Array, out: jax.Array) -> jax.Array:
    """Apply the point of the heads' shares [*B, T, N, D] in out [*B, T, D], the projection of x."""
    if linear is None or linear.kernel is None or not tap.needs("result"):
        return out

    def share(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x, kernel = promote_dtype(x, kernel, dtype=linear.dtype)
        return jnp.einsum("...tnv,nvd->...tnd", x, kernel, precision=linear.precision)

    names = ("batch", "length", "heads", None)
    shares = tap("result", sharding.auto(share, names, x, linear.kernel), names)
    if tap.prefix + "result" not in tap.edits:
        return out

    def add(shares: jax.Array, bias: jax.Array | None) -> jax.Array:
        total = shares.sum(-2, dtype=shapes.wide(shares.dtype))
        if bias is not None:
            total = total + shapes.lead(bias.astype(total.dtype), total.ndim)
        return total.astype(dtype)

    dtype = out.dtype
    return sharding.auto(add, FEATURES, shares, linear.bias)


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


def _arguments(p: Mapping[str, Any], settings: Settings, call: Call) -> dict[str, Any]:
    """Return the arguments of attention beside queries, keys and values."""
    reads = call.tap.reads
    scale = settings.scale if call.scale is None else call.scale
    arguments: dict[str, Any] = {
        "mask": masks.combine(settings.mask, call.mask), "bias": call.bias,
        "scores": as_scores(call.scores), "sinks": p.get("sinks"), "kernel": settings.kernel,
        "precision": settings.precision, "normalizer": settings.normalizer,
        # A learned scale is in the queries.
        "scale": 1.0 if "score_scale" in p else scale,
        "capture": reads and reads.of_softmax(), "return_weights": call.return_weights,
    }  # fmt: skip
    if call.dropout_rng is not None:
        arguments |= {
            "dropout_rng": call.dropout_rng, "dropout_rate": settings.dropout_rate,
            "broadcast_dropout": settings.broadcast_dropout,
        }  # fmt: skip
    if call.attention is not None:
        arguments["attention"] = call.attention
    elif settings.custom_attention is not None:
        arguments["attention"] = functools.partial(
            custom_attention.run, settings.custom_attention, dtype=settings.dtype,
            force_fp32_for_softmax=settings.force_fp32_for_softmax, module=call.sower,
        )  # fmt: skip
    return arguments
