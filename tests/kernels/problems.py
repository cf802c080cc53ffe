"""The call that a case describes, and its results by the float64 oracle.

Masks and scores are rows of the catalogues, each as the library's and in NumPy.
"""

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.kernels.call.dropout import WeightDropout
from flax_mha.masks import Mask
from flax_mha.scores import ScoreMod
from tests.kernels.cases import Case
from tests.masks.catalogue import MASKS, Scene
from tests.scores.catalogue import SCORES, Row
from tests.support import oracle, plain_attention

N, H = 4, 8
HEADS = {"mha": (4, H), "gqa": (2, H), "mqa": (1, H), "dv": (2, 5)}
RATE, KEY, SCALE = 0.3, 7, 0.25
# This times scores of variance 1: the largest of a few thousand are near 50.
SHARP = 15
# Where few numbers make up a result, or nearly cancel, the error of plain attention is luck: one
# rounding's may be a tenth of the next one's. In half precision the yardstick is the largest of
# this many and one.
ROUNDINGS = 8
# The step of differences.
STEP = 1e-5
# Sinks that take little, some and most of the weight.
SINKS = np.array([0.0, 1.0, -2.0, 5.0], np.float32)


def learned_of(score: str, at: Scene, dtype: str) -> dict[str, np.ndarray]:
    """Return the arrays of a case's bias, sinks and score functions by name."""
    shapes = {
        "bias": (*at.batch, N, at.T, at.S), "bias_of_keys": (at.S,),
        "bias_of_rows": (*at.batch, 1, 1, at.S), "all_scores": (at.T, at.S),
    }  # fmt: skip
    learned: dict[str, Any] = {}
    if score in shapes:
        learned["bias"] = jnp.asarray(at.rng.normal(size=shapes[score]), jnp.float32)
    for name in functions_of(score):
        learned |= {array: make(at) for array, make in SCORES[name].arrays.items()}
    if score == "bias_of_heads":
        learned["array"] = jnp.asarray(learned["array"], dtype)
    if score in ("sinks", "all_scores"):
        learned["sinks"] = SINKS
    return learned


def functions_of(score: str) -> tuple[str, ...]:
    """Return the names of a case's score functions, in their order."""
    return ("cap", "alibi", "t5") if score == "all_scores" else (score,) if score in SCORES else ()


def mods_of(score: str, learned: dict[str, jax.Array]) -> tuple[ScoreMod, ...]:
    return tuple(row.make(**arrays) for row, arrays in _rows(score, learned))


def rules_of(score: str, at: Scene, learned: dict[str, Any]) -> tuple[oracle.ScoreRule, ...]:
    """Return a case's score functions in NumPy, for arrays of scores [*batch, N, T, S]."""

    def rule(row: Row, arrays: dict[str, Any]) -> oracle.ScoreRule:
        def flat(s: np.ndarray) -> np.ndarray:
            return s.reshape(at.rows, N, at.T, at.S)

        def pullback(ds: np.ndarray, s: np.ndarray, sign: int) -> Any:
            assert row.pullback is not None
            before, gradients = row.pullback(flat(ds), flat(s), at, sign, **arrays)
            return before.reshape(s.shape), gradients

        return oracle.ScoreRule(
            lambda s: np.broadcast_to(row.value(flat(s), at, **arrays), flat(s).shape).reshape(
                s.shape
            ),
            pullback,
        )

    return tuple(rule(*row) for row in _rows(score, oracle.float64(learned)))


def _rows(score: str, learned: dict[str, Any]) -> list[tuple[Row, dict[str, Any]]]:
    """Return the catalogue's rows of a case, each with its arrays."""
    rows = [SCORES[name] for name in functions_of(score)]
    return [(row, {name: learned[name] for name in row.arrays}) for row in rows]


class Problem(NamedTuple):
    """A call and its exact results.

    Attributes:
      qkv: the operands.
      cotangents: the cotangents of out and lse.
      learned: arrays of scores that take gradients.
      given: mask, q_positions and kv_positions.
      call: a function from the learned arrays to further arguments.
      truth: out, lse and gradients by name, in float64.
      plain: yields the same values by `tests.support.plain_attention`, in half precision several
        times, with other roundings, and if True is passed with the mean of a rounded output.
      sizes: the sizes of the gradients if nothing cancelled.
      at: the coordinates.
      known: the oracle's arguments after q, k and v.
      score: the case's value of this factor.
    """

    qkv: tuple[jax.Array, ...]
    cotangents: tuple[jax.Array, jax.Array]
    learned: dict[str, Any]
    given: tuple[Any, Any, Any]
    call: Callable[[dict[str, jax.Array]], dict[str, Any]]
    truth: dict[str, np.ndarray]
    plain: Callable[[bool], Iterator[dict[str, np.ndarray]]]
    sizes: dict[str, float]
    at: Scene
    known: dict[str, Any]
    score: str


@functools.lru_cache(maxsize=4)
def problem_of(case: Case) -> Problem:
    *batch, T, S = (int(n) for n in case.size.split("x") if n)
    at = Scene(tuple(batch), T, S, case.place, zlib.crc32(str(case).encode()))
    mask, allowed = (None, None) if case.mask == "none" else MASKS[case.mask](at)
    return pose(at, mask, None if allowed is None else at.table(allowed), case)


def pose(at: Scene, mask: Mask | None, allowed: np.ndarray | None, case: Case) -> Problem:
    """Build the problem of this mask with its known table."""
    K, Hv = HEADS[case.heads]
    sizes = [(at.T, N, H), (at.S, K, H), (at.S, K, Hv), (at.T, N, Hv)]
    q, k, v, dout = (at.rng.normal(size=(*at.batch, *size)) for size in sizes)
    q = 4 * q if case.score in ("cap", "all_scores") else q
    q = SHARP * q if case.spread == "sharp" else q
    operands = tuple(jnp.asarray(x, case.dtype) for x in (q, k, v, dout))
    dlse = jnp.asarray(at.rng.normal(size=(*at.batch, N, at.T)), jnp.float32)
    learned = learned_of(case.score, at, case.dtype)

    known: dict[str, Any] = {"allowed": allowed} | of_arrays(case.score, at, learned)
    of_case: dict[str, Any] = {}
    if case.scale != "default":
        known |= {"scale": SCALE}
        of_case = {"scale": SCALE}
    if case.dropout != "no_dropout":
        broadcast = case.dropout == "dropout_broadcast"
        of_case |= {"dropout_rate": RATE, "dropout_rng": jax.random.key(KEY)}
        of_case |= {"broadcast_dropout": broadcast}
        known |= {"rate": RATE, "keep": at.table(kept(at, broadcast))}

    def call(learned: dict[str, jax.Array]) -> dict[str, Any]:
        arrays = {"sinks": learned.get("sinks"), "scores": mods_of(case.score, learned)}
        if case.scale == "array":
            # Traced, also without arguments that are.
            arrays["scale"] = jax.lax.optimization_barrier(jnp.float32(SCALE))
        return of_case | arrays | ({"bias": learned["bias"]} if "bias" in learned else {})

    known |= {"cotangent": operands[3], "lse_cotangent": dlse}
    truth = by_name(learned, *exact(*operands[:3], **known))

    def plain(as_cudnn: bool) -> Iterator[dict[str, np.ndarray]]:
        def computed(**options: Any) -> dict[str, np.ndarray]:
            found = plain_attention.attention(*operands[:3], **known, **options)
            named = by_name(learned, *found)
            return named | {name: named[name].astype(x.dtype) for name, x in learned.items()}

        yield (first := computed())
        if case.dtype == "float32":
            return
        for seed in range(ROUNDINGS):
            yield computed(shifts=np.random.default_rng(seed))
        # Sums over all scores, such as the gradient of a slope, nearly cancel: see `mean_of`.
        of_out = computed(mean_of="out")
        yield first | {name: of_out[name] for name in learned}
        if as_cudnn:
            yield computed(mean_of="rounded out")

    positive = oracle.attention_gradients(*operands[:3], **known, cancelling=False)
    sizes = {
        name: float(np.linalg.norm(x))
        for name, x in by_name(learned, truth["out"], truth["lse"], positive).items()
        if name not in ("out", "lse")
    }
    # A number means that positions count from it.
    ends = case.place == "aligned" and case.given == "known"
    q_positions = at.S - at.T if ends else at.q_positions
    given = (mask, q_positions, at.kv_positions)
    return Problem(
        operands[:3],
        (operands[3], dlse),
        learned,
        given,
        call,
        truth,
        plain,
        sizes,
        at,
        known,
        case.score,
    )


def derivative(problem: Problem, x: Any, t: Any, of_gradients: bool) -> Any:
    """Return the derivative of the results, or of the gradients, along a direction.

    By central differences of the oracle, at x with keys "qkv" and "learned". Each lse of −∞ counts
    as 0.
    """

    def moved(step: float) -> Any:
        at = jax.tree.map(lambda a, b: oracle.float64(a) + step * oracle.float64(b), x, t)
        learned = at["learned"]
        known = problem.known | of_arrays(problem.score, problem.at, learned)
        out, lse, found = exact(*at["qkv"], **known)
        if not of_gradients:
            return out, np.where(np.isneginf(lse), 0.0, lse)
        return {"qkv": tuple(found[:3]), "learned": learned_gradients(learned, found)}

    return jax.tree.map(lambda a, b: (a - b) / (2 * STEP), moved(STEP), moved(-STEP))


def exact(*qkv: Any, **known: Any) -> tuple[np.ndarray, np.ndarray, oracle.Gradients]:
    """Compute out, lse and gradients with the oracle."""
    rest = {name: x for name, x in known.items() if "cotangent" not in name}
    out, lse, _ = oracle.attention(*qkv, **rest)
    return out, lse, oracle.attention_gradients(*qkv, **known)


def of_arrays(score: str, at: Scene, learned: dict[str, Any]) -> dict[str, Any]:
    """Return the oracle's arguments that hold arrays which take gradients."""
    arguments = {name: learned.get(name) for name in ("bias", "sinks")}
    return arguments | {"scores": rules_of(score, at, learned)}


def learned_gradients(learned: dict[str, Any], found: oracle.Gradients) -> dict[str, np.ndarray]:
    """Return the gradients of the arrays that take them."""
    gradients = dict(found.scores)
    if found.sinks is not None:
        gradients["sinks"] = found.sinks
    if "bias" in learned:
        gradients["bias"] = oracle.summed_to(found.bias, learned["bias"].shape)
    return gradients


def by_name(
    learned: dict[str, Any], out: np.ndarray, lse: np.ndarray, found: oracle.Gradients
) -> dict[str, np.ndarray]:
    """Return results, and gradients of operands and learned arrays, by name."""
    named = {"out": out, "lse": lse, "q": found.q, "k": found.k, "v": found.v}
    return named | learned_gradients(learned, found)


@functools.partial(jax.jit, static_argnums=0)
def _keep(broadcast: bool, *coordinates: jax.Array) -> jax.Array:
    return WeightDropout.from_key(jax.random.key(KEY), RATE, broadcast).keep(*coordinates)


def kept(at: Scene, broadcast: bool) -> np.ndarray:
    """Return the weights that dropout keeps. Tests of dropout check the pattern itself."""
    return np.asarray(_keep(broadcast, at.row, at.head[None], at.i, at.j))
