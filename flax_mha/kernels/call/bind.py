"""The arguments of an attention call, checked and converted to an `AttentionSpec`."""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.sharding import AbstractMesh

from flax_mha import masks
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array, ScoreArray, whole
from flax_mha.base.shapes import Dims
from flax_mha.base.trees import combine, is_array, partition
from flax_mha.kernels.call.dropout import WeightDropout
from flax_mha.kernels.call.mask_parts import conjuncts
from flax_mha.kernels.call.normalizers import OTHERS, SOFTMAX
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.call.stored import Stored
from flax_mha.masks.algebra import resolve
from flax_mha.positions import turn
from flax_mha.scores import Bias, ScoreMod, Vectors, as_scores
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
        dims = shapes.attention_dims(q, k, v)
    else:
        k, v = (jnp.asarray(checks.floating(name, x)) for name, x in (("k", k), ("v", v)))
        dims = shapes.attention_dims(q, k, v)
        promoted: list[jax.Array] = promote_dtype(q, k, v, dtype=None)
        q, k, v = promoted
    scores = as_scores(scores)
    if bias is not None:
        scores = (*scores, Bias(bias))
    if sinks is not None:
        checks.floating("sinks", sinks)
        shapes.check_shape("sinks", sinks, {"[N]": (dims.N,)}, "give one for each query head")
        sinks = jnp.asarray(sinks)
    if precision is not None:
        checks.precision("precision", precision)
    checks.choice("normalizer", normalizer, {SOFTMAX: None, **OTHERS})
    if sinks is not None and normalizer != SOFTMAX:
        raise ValueError(f"sinks take weight in a softmax, got normalizer={normalizer!r}; drop one")
    q_pos = shapes.positions("q_positions", q_positions, (*dims.B, dims.T), "T")
    k_pos = shapes.positions("kv_positions", kv_positions, (*dims.B, dims.S), "S")
    at = whole(dims, q_pos, k_pos)
    bound = None if mask is None else masks.as_mask(mask).bind(dims)
    if bound is not None:
        bound.check_positions(at)
    spec = AttentionSpec(
        mask=None if bound is None else resolve(bound, at),
        scores=tuple(mod.bind(dims) for mod in scores),
        sinks=sinks,
        dropout=_make_dropout(dropout_rate, dropout_rng, broadcast_dropout),
        q_pos=None if q_pos is None else ScoreArray(at.q),
        k_pos=None if k_pos is None else ScoreArray(at.k),
        scale=dims.H**-0.5 if scale is None else _check_scale(scale),
        precision=precision,
        normalizer=normalizer,
        count=None if normalizer == SOFTMAX else _count_keys(mask, dims, k_pos is None),
        turns=turns,
        platform=current_platform(),
    )
    _trace_user_functions(spec, dims, q.dtype)
    return q, k, v, spec


def _count_keys(mask: masks.MaskLike | None, dims: Dims, is_whole: bool) -> ScoreArray | None:
    """Return the number of keys without padding [*B|1, 1, 1, 1], None for all.

    It is at most S if `is_whole`. A row of a ring buffer is longer than its slots.
    """
    parts = conjuncts(None if mask is None else masks.as_mask(mask))
    # By type, before they are bound: for one query, tables of pairs have the shape of these too.
    lengths = [x for x in parts if type(x) is masks.Lengths and jnp.ndim(x.kv) <= len(dims.B)]
    ends = [jnp.asarray(x.bind(dims).kv.array) for x in lengths]
    at = whole(dims)
    tables = [x.bind(dims).allowed(at) for x in parts if type(x) is masks.Keys]
    if tables:
        real = functools.reduce(jnp.logical_and, tables + [at.k < n for n in ends])
        return ScoreArray(real.sum(-1, keepdims=True))
    if not ends:
        return None
    return ScoreArray(functools.reduce(jnp.minimum, ends + [jnp.asarray(dims.S)] * is_whole))


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


def _trace_user_functions(spec: AttentionSpec, dims: Dims, dtype: jnp.dtype) -> None:
    """Trace user-defined masks and scores, to find their errors at any length.

    Raises:
      TypeError: if a function closes over traced arrays, because it would lose their gradients.
    """
    if not (types := spec.user_types()):
        return
    arrays, static = partition((spec, spec.at(dims)), is_array)

    def apply(score: jax.Array, vectors: Vectors, arrays: Any) -> jax.Array:
        spec, at = combine(arrays, static)
        return spec.apply(score, at, vectors=vectors)[0]

    def struct_of(x: jax.Array) -> jax.ShapeDtypeStruct:
        aval = jax.typeof(x)  # Without the mesh.
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    score, *vectors = (
        jax.ShapeDtypeStruct((*dims.B, dims.N, *sizes), shapes.wide(dtype))
        for sizes in ((dims.T, dims.S), (dims.T, dims.H), (dims.S, dims.H))
    )
    # User functions do not see the mesh.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        program = jax.make_jaxpr(apply)(score, tuple(vectors), jax.tree.map(struct_of, arrays))
    traced = [x for x in program.consts if isinstance(x, jax.core.Tracer)]
    if traced:
        names = " or ".join(sorted({cls.__name__ for cls in types}))
        raise TypeError(
            f"a function of {names} must be given traced arrays as its args, got one that closes "
            f"over {checks.describe(traced[0])}; write Score(fn, (x,)) or Predicate(fn, (x,))"
        )


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
