"""The arguments of an attention call, checked and converted to an `AttentionSpec`."""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from flax_mha import masks
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array, ScoreArray, whole
from flax_mha.kernels.call.dropout import WeightDropout
from flax_mha.kernels.call.normalizers import OTHERS, SOFTMAX, count_keys
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.call.stored import Stored
from flax_mha.masks.algebra import resolve
from flax_mha.positions import turn
from flax_mha.scores import Bias, ScoreMod, as_scores
from flax_mha.sharding.devices import current_platform

Keyed: TypeAlias = Array | Stored


class Options(TypedDict, total=False):
    """The keyword arguments of `bind_call`, for type checkers."""

    mask: masks.MaskLike | None
    bias: Array | None
    scores: Sequence[ScoreMod]
    sinks: Array | None
    scale: float | Array | None
    dropout_rate: float
    dropout_rng: jax.Array | None
    broadcast_dropout: bool
    q_positions: Array | int | None
    kv_positions: Array | int | None
    precision: jax.lax.PrecisionLike
    normalizer: str


def bind_call(
    q: Array,
    k: Keyed,
    v: Keyed,
    *,
    mask: masks.MaskLike | None = None,
    bias: Array | None = None,
    scores: Sequence[ScoreMod] = (),
    sinks: Array | None = None,
    scale: float | Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = False,
    q_positions: Array | int | None = None,
    kv_positions: Array | int | None = None,
    precision: jax.lax.PrecisionLike = None,
    normalizer: str = SOFTMAX,
) -> tuple[jax.Array, jax.Array | Stored, jax.Array | Stored, AttentionSpec]:
    """Check a call's arguments, and return q, k, v and an `AttentionSpec`."""
    q, k, turns = turn.split(q, k)
    q = jnp.asarray(checks.floating("q", q))
    if isinstance(k, Stored) and isinstance(v, Stored):
        k, v = k.replace(dtype=q.dtype), v.replace(dtype=q.dtype)
    else:
        k, v = (jnp.asarray(checks.floating(name, x)) for name, x in (("k", k), ("v", v)))
    if sinks is not None:
        sinks = jnp.asarray(checks.floating("sinks", sinks))
    checks.choice("normalizer", normalizer, {SOFTMAX: None, **OTHERS})
    if sinks is not None and normalizer != SOFTMAX:
        raise ValueError(f"sinks take weight in a softmax, got normalizer={normalizer!r}; drop one")
    dropout = _make_dropout(dropout_rate, dropout_rng, broadcast_dropout)
    scale = None if scale is None else _check_scale(scale)
    dims = shapes.attention_dims(q, k, v)
    if sinks is not None:
        shapes.check_shape("sinks", sinks, {"[N]": (dims.N,)}, "give one for each query head")
    q_pos = shapes.positions("q_positions", q_positions, (*dims.B, dims.T), "T")
    k_pos = shapes.positions("kv_positions", kv_positions, (*dims.B, dims.S), "S")
    if not isinstance(k, Stored):
        promoted: list[jax.Array] = promote_dtype(q, k, v, dtype=None)
        q, k, v = promoted
    at = whole(dims, q_pos, k_pos)
    mask = None if mask is None else masks.as_mask(mask)
    bound = None if mask is None else mask.bind(dims)
    if bound is not None:
        bound.check_positions(at)
    scores = as_scores(scores) if bias is None else (*as_scores(scores), Bias(bias))
    spec = AttentionSpec(
        mask=None if bound is None else resolve(bound, at),
        scores=tuple(mod.bind(dims) for mod in scores),
        sinks=sinks,
        dropout=dropout,
        q_pos=None if q_pos is None else ScoreArray(at.q),
        k_pos=None if k_pos is None else ScoreArray(at.k),
        scale=dims.H**-0.5 if scale is None else scale,
        precision=precision,
        normalizer=normalizer,
        count=None if normalizer == SOFTMAX else count_keys(mask, dims, k_pos is None),
        turns=turns,
        platform=current_platform(),
    )
    spec.check_user_functions(dims, q.dtype)
    return q, k, v, spec


def _make_dropout(rate: float, rng: jax.Array | None, broadcast: bool) -> WeightDropout | None:
    """Return the dropout of a call, or None."""
    checks.rate("dropout_rate", rate)
    checks.flag("broadcast_dropout", broadcast)
    if not rate:
        return None
    if rng is None:
        raise ValueError(
            f"dropout_rate={rate} needs a dropout_rng, got None; "
            f"give a jax.random.key, or dropout_rate=0"
        )
    return WeightDropout.from_key(checks.key("dropout_rng", rng), rate, broadcast)


def _check_scale(scale: Any) -> float | jax.Array:
    """Return the factor of the scores, a number or a scalar array, which may be traced."""
    if not (hasattr(scale, "dtype") and hasattr(scale, "shape")):
        return checks.number("scale", scale)
    checks.floating("scale", scale)
    if scale.shape:
        raise ValueError(
            f"scale must be one number, got an array of shape {scale.shape}; scale the queries of "
            f"each head instead"
        )
    return scale
