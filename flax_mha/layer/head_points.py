"""The points of an attention layer: queries, keys, values, scores, weights, heads, output."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import At, ScoreArray
from flax_mha.base.shapes import Dims
from flax_mha.cache.sources import KeyValue
from flax_mha.kernels import Capture, dot_product_attention, observe
from flax_mha.kernels.normalizers import SOFTMAX
from flax_mha.kernels.softmax import finite
from flax_mha.kernels.stored import dequantize
from flax_mha.layer.linear import Linear
from flax_mha.layer.points import FEATURES, Edit, Points
from flax_mha.masks import combine
from flax_mha.scores import Bias, ScoreMod


def _pick_tokens(x: jax.Array, capture: Capture) -> jax.Array:
    """Return the captured queries of features [*B, T, D]."""
    return _pick_heads(x[..., None, :], dataclasses.replace(capture, heads=None))[..., 0, :]


def _pick_heads(x: jax.Array, capture: Capture) -> jax.Array:
    """Return the captured queries and heads of x [*B, T, N, H]."""
    heads, queries = capture.chosen(Dims.of(x, x, x))
    return jnp.swapaxes(observe.pick(jnp.swapaxes(x, -3, -2), heads, queries), -3, -2)


def edit_inputs(
    points: Points, q: jax.Array, k: Any, v: Any, kv: Any
) -> tuple[jax.Array, Any, Any, Any]:
    """Apply the points of queries, keys and values.

    Args:
      points: the points of the call.
      q: the queries [*B, T, N, H].
      k: the keys of this call [*B, S, K, H], or None.
      v: the values of this call [*B, S, K, Hv], or None.
      kv: keys and values in their place, such as `KeyValue`, or a cache.

    Returns:
      All four.
    """
    q = points("q", q, sharding.HEADS, _pick_heads)

    def pick(x: jax.Array, capture: Capture) -> jax.Array:
        heads, _ = capture.chosen(Dims.of(q, q, q))
        return x if heads is None else jnp.take(x, heads // (q.shape[-2] // x.shape[-2]), -2)

    def of_keys(name: str, x: jax.Array) -> jax.Array:
        return points(name, x, sharding.KV_HEADS, pick)

    if k is not None:
        k, v = of_keys("k", k), of_keys("v", v)
    elif isinstance(kv, KeyValue):
        kv = kv.replace(key=of_keys("k", kv.key), value=of_keys("v", kv.value))
    return q, k, v, kv


def edit_heads(points: Points, z: jax.Array) -> jax.Array:
    """Apply the point of the heads' outputs [*B, T, N, Hv]."""
    return points("z", z, sharding.HEADS, _pick_heads)


def edit_output(points: Points, linear: Linear | None, x: jax.Array, out: jax.Array) -> jax.Array:
    """Apply the points of heads' shares and of the output, and check that no edit is left.

    Args:
      points: the points of the call.
      linear: the output projection, or None.
      x: the heads' outputs [*B, T, N, Hv], after gate and head mask.
      out: the output [*B, T, D].
    """
    if linear is not None:
        out = _edit_results(points, linear, x, out)
    out = points("out", out, pick=_pick_tokens)
    points.finish()
    return out


def _edit_results(points: Points, linear: Linear, x: jax.Array, out: jax.Array) -> jax.Array:
    """Apply the point of each head's share of out, [*B, T, N, D], if it is needed."""
    if linear.kernel is None or not points.needs("result"):
        return out

    def share(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x, kernel = promote_dtype(x, kernel, dtype=linear.dtype)
        return jnp.einsum("...tnv,nvd->...tnd", x, kernel, precision=linear.precision)

    names = ("batch", "length", "heads", None)
    shares = points("result", sharding.auto(share, names, x, linear.kernel), names, _pick_heads)
    if points.prefix + "result" not in points.edits:
        return out

    def add(shares: jax.Array, bias: jax.Array | None) -> jax.Array:
        total = shares.sum(-2, dtype=shapes.wide(shares.dtype))
        if bias is not None:
            total = total + shapes.lead(bias.astype(total.dtype), total.ndim)
        return total.astype(out_dtype)

    out_dtype = out.dtype
    return sharding.auto(add, FEATURES, shares, linear.bias)


def edit_scores(points: Points, arguments: dict[str, Any], q: jax.Array, S: int) -> None:
    """Put edits of scores and weights into the arguments of attention from q to S keys."""
    *B, T, N, _ = q.shape
    scores = jax.ShapeDtypeStruct((*B, N, T, S), shapes.wide(q.dtype))
    edit = points.edit("scores", scores)
    if edit is not None:
        bias = arguments.pop("bias")
        before = () if bias is None else (Bias(bias),)
        arguments["scores"] = (*arguments["scores"], *before, _EditedScores(edit))
    if "attention" not in arguments:
        edit = points.edit("weights", scores.update(dtype=q.dtype))
        if edit is not None:
            arguments["attention"] = functools.partial(_attend_with_weights, edit)


def read_pairs(
    points: Points, attention: Any, qkv: tuple[jax.Array, Any, Any], call: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> None:  # fmt: skip
    """Read the mean weight of each head on each of `points.pairs`, as `pairs` by name, [N].

    The weight of query i on pairs P is exp(lse(mask ∧ P) − lse(mask)), and the mean is over the
    queries that see such a key. It is NaN if there are none.

    Args:
      points: the points of the call.
      attention: the function that computes it.
      qkv: the queries [*B, T, N, H], keys [*B, T, K, H] and values [*B, T, K, Hv].
      call: the other arguments of `dot_product_attention`.
      changes: the arguments that differ for pairs.
    """
    if not points.pairs:
        return
    normalizer = call["normalizer"]
    if attention is not dot_product_attention or normalizer != SOFTMAX:
        got = f"normalizer={normalizer!r}" if normalizer != SOFTMAX else checks.describe(attention)
        raise ValueError(
            f"weights on pairs need a layer whose weights are one softmax of its scores, got {got} "
            f"at {'/'.join(points.path) or 'the layer'}; read `weights` of this layer instead"
        )
    call = {name: x for name, x in call.items() if "dropout" not in name}
    call |= {"kernel": "auto", "capture": Capture(("lse",)), "return_weights": False}

    def lse(**changes: Any) -> jax.Array:
        result: jax.Array = dot_product_attention(*qkv, **call | changes)[-1]["lse"]
        return result

    def mean(some: jax.Array, whole: jax.Array) -> jax.Array:
        seen = some != -jnp.inf
        weights = jnp.exp(jnp.where(seen, some - whole, -jnp.inf))
        axes = (*range(some.ndim - 2), -1)
        return weights.sum(axes) / seen.sum(axes, dtype=weights.dtype)

    whole, means = lse(), {}
    for name, pairs in points.pairs.items():
        some = lse(mask=combine(call["mask"], pairs), **changes)
        means[name] = sharding.auto(mean, ("heads",), some, whole)
    points.captured["pairs"] = cast(Any, means)


class _EditedScores(ScoreMod):
    """keep·score + add, for arrays that broadcast to the scores [*B, N, T, S]."""

    edit: Edit

    def bind(self, dims: Dims) -> Self:
        def over_scores(x: Any) -> ScoreArray:
            return ScoreArray(shapes.lead(jnp.asarray(x, jnp.float32), len(dims.logits)))

        return self.replace(edit=jax.tree.map(over_scores, self.edit))

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        return Edit(self.edit.keep.array, self.edit.add.array)(score)


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
    names = () if capture is None else tuple(capture.what)
    chosen, _ = Capture((), edit.heads).chosen(dims)
    heads = np.arange(dims.N) if chosen is None else chosen
    kept, queries = (capture or Capture((), edit.heads)).chosen(dims)
    read = np.arange(dims.N) if kept is None else kept
    both = np.union1d(heads, read)
    out, *whole, values = dot_product_attention(
        q, k, v, capture=Capture((*{*names, "weights"},), tuple(both.tolist())),
        return_weights=return_weights, **call,
    )  # fmt: skip

    def change(edit: Edit, v: jax.Array, out: jax.Array, w: jax.Array, *whole: jax.Array) -> Any:
        at = np.searchsorted(both, heads)
        new = edit(w[..., at, :, :])
        v = jnp.take(v, heads // dims.G, -2)
        z = jnp.einsum("...hts,...shd->...thd", new, finite(v), precision=call.get("precision"))
        # A weight of 0 hides a value that is not finite.
        bad = jnp.swapaxes(~jnp.isfinite(v).all(-1), -1, -2)[..., None, :]
        bad = jnp.swapaxes(((new != 0) & bad).any(-1), -1, -2)[..., None]
        out = out.at[..., heads, :].set(jnp.where(bad, jnp.nan, z).astype(out.dtype))
        return [
            out,
            w.at[..., at, :, :].set(new),
            *(x.at[..., heads, :, :].set(new) for x in whole),
        ]

    axes = ("batch", None, "length", None)
    out, values["weights"], *whole = sharding.auto(
        change, [sharding.HEADS, axes, *(axes for _ in whole)],
        edit, dequantize(v), out, values["weights"], *whole,
    )  # fmt: skip
    at = np.searchsorted(both, read)
    captured = {}
    for name in names:
        # Values of a query have no axis of keys.
        is_square = values[name].ndim == values["weights"].ndim
        x = values[name] if is_square else values[name][..., None]
        x = observe.pick(x, at, queries)
        captured[name] = x if is_square else x[..., 0]
    return (out, *whole, *([captured] if capture else []))
