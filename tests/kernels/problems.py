"""The call that a case describes, and what the float64 oracle says of it.

Masks and scores are each written twice: as the library's value, and in NumPy from the definition.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.kernels.dropout import Dropout
from flax_mha.masks import Causal, Dense, Keys, Lengths, Mask, PerHead, Predicate, Prefix, Segments
from flax_mha.masks import Window as Near
from flax_mha.scores import Alibi, Bias, RelativeBias, ScoreMod, SoftCap
from tests import oracle
from tests.kernels.cases import Case

N, H = 4, 8
HEADS = {"mha": (4, H), "gqa": (2, H), "mqa": (1, H), "dv": (2, 5)}
CAP, RATE, KEY = 1.5, 0.3, 7
# Sinks of little, some and most of the weight.
SINKS = np.array([0.0, 1.0, -2.0, 5.0], np.float32)


class Scene:
    """Coordinates of the scores of R batch rows, [R|1, N|1, T|1, S|1], and arrays over them."""

    def __init__(self, batch: tuple[int, ...], T: int, S: int, place: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.batch, self.T, self.S, self.rows = batch, T, S, math.prod(batch)
        self.row = np.arange(self.rows)[:, None, None, None]
        self.head = np.arange(N)[:, None, None]
        self.q_positions, self.kv_positions = self._positions(place)
        self.i = self.over(np.arange(T) if self.q_positions is None else self.q_positions, 3)
        self.j = self.over(np.arange(S) if self.kv_positions is None else self.kv_positions, 2)

    def _positions(self, place: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        T, S = self.T, self.S
        if place == "from_0":
            return None, None
        if place == "aligned":
            return S - T + np.arange(T), None
        rows = [self.rng.permutation(T) + 3 * row for row in range(self.rows)]
        return np.reshape(rows, (*self.batch, T)), self.rng.permutation(2 * S)[:S]

    def over(self, x: np.ndarray, axis: int) -> np.ndarray:
        """Numbers [*batch], or for each query (axis 3) or key (axis 2) [*batch, ·] or [·]."""
        rows = self.rows if x.ndim > 1 or axis == 0 else 1
        return x.reshape(rows, 1, *{0: (1, 1), 2: (1, -1), 3: (-1, 1)}[axis])

    def table(self, allowed: np.ndarray) -> np.ndarray:
        """The table [*batch, N, T, S]."""
        whole = np.broadcast_to(allowed, (self.rows, N, self.T, self.S))
        return whole.reshape(*self.batch, N, self.T, self.S)

    def lengths(self, most: int, shape: tuple[int, ...] = ()) -> np.ndarray:
        """Numbers up to most, [*batch, *shape]; the last is 0 where there are several."""
        x = np.asarray(self.rng.integers(0, most + 1, (*self.batch, *shape)))
        x.flat[x.size - 1 :] = 0 if x.size > 1 else x
        return x

    def ids(self, length: int) -> np.ndarray:
        """Sorted segment ids [*batch, length]."""
        return np.sort(self.rng.integers(0, 4, (*self.batch, length)))


def lengths(at: Scene) -> tuple[Mask, np.ndarray]:
    kv = at.lengths(at.S)
    return Lengths(kv), at.j < at.over(kv, 0)


def lengths_of_both(at: Scene) -> tuple[Mask, np.ndarray]:
    kv, q = at.lengths(at.S) + 1, at.lengths(at.T) + 1
    return Lengths(kv, q), (at.j < at.over(kv, 0)) & (at.i < at.over(q, 0))


def lengths_per_query(at: Scene) -> tuple[Mask, np.ndarray]:
    kv = at.lengths(at.S, (at.T,))
    return Lengths(kv), at.j < at.over(kv, 3)


def segments(at: Scene) -> tuple[Mask, np.ndarray]:
    q, kv = at.ids(at.T), at.ids(at.S)
    return Segments(q, kv), at.over(q, 3) == at.over(kv, 2)


def packed(at: Scene) -> tuple[Mask, np.ndarray]:
    mask, allowed = segments(at)
    return Causal() & mask, allowed & (at.j <= at.i)


def prefix(at: Scene) -> tuple[Mask, np.ndarray]:
    length = at.S // 3
    return Prefix(length), (at.j < length) | (at.j <= at.i)


def prefix_per_row(at: Scene) -> tuple[Mask, np.ndarray]:
    length = at.lengths(at.S)
    return Prefix(length), (at.j < at.over(length, 0)) | (at.j <= at.i)


def dense(at: Scene) -> tuple[Mask, np.ndarray]:
    table = at.rng.random((*at.batch, N, at.T, at.S)) < 0.2
    return Dense(table), table.reshape(-1, *table.shape[-3:])


def dense_of_keys(at: Scene) -> tuple[Mask, np.ndarray]:
    table = at.rng.random((*at.batch, 1, 1, at.S)) < 0.7
    return Keys(table[..., 0, 0, :]), table.reshape(-1, 1, 1, at.S)


def dense_in_blocks(at: Scene) -> tuple[Mask, np.ndarray]:
    """Empty, full and mixed tiles, the same for all."""
    coarse = at.rng.random((at.T // 40 + 1, at.S // 40 + 1)) < 0.4
    table = np.kron(coarse, np.ones((40, 40), bool))[: at.T, : at.S] > 0
    return Dense(table), table


def predicate(at: Scene) -> tuple[Mask, np.ndarray]:
    def rule(row: Any, head: Any, i: Any, j: Any, m: Any) -> Any:
        return (i + j + head + row) % m == 0

    return Predicate(rule, (np.array(3),)), rule(at.row, at.head, at.i, at.j, 3)


def per_head(at: Scene) -> tuple[Mask, np.ndarray]:
    near, far = np.abs(at.i - at.j) <= 4, at.j > at.i
    mask, table = dense(at)
    choices = [at.table(x).reshape(at.rows, N, at.T, at.S) for x in (~far, near, far, table)]
    allowed = np.stack([choice[:, n] for n, choice in enumerate(choices)], 1)
    return PerHead([Causal(), Near(4, 4), ~Causal(), mask]), allowed


def mixed(at: Scene) -> tuple[Mask, np.ndarray]:
    mask, same = segments(at)
    other, short = lengths(at)
    near = (at.i <= at.j) & (at.j <= at.i + 9)
    return (Causal() | Near(0, 9)) & ~(mask & other), ((at.j <= at.i) | near) & ~(same & short)


MASKS: dict[str, Callable[[Scene], tuple[Mask, np.ndarray]]] = {
    "causal": lambda at: (Causal(), at.j <= at.i),
    "window": lambda at: (Near(20, 3), (at.i - 20 <= at.j) & (at.j <= at.i + 3)),
    "window_left": lambda at: (Near(left=100), at.i - 100 <= at.j),
    "lengths": lengths, "lengths_of_both": lengths_of_both,
    "lengths_per_query": lengths_per_query, "segments": segments, "packed": packed,
    "prefix": prefix, "prefix_per_row": prefix_per_row, "dense": dense,
    "dense_of_keys": dense_of_keys, "dense_in_blocks": dense_in_blocks, "predicate": predicate,
    "per_head": per_head, "mixed": mixed,
}  # fmt: skip


def bucket_of(distance: np.ndarray) -> np.ndarray:
    """T5's bucket of j − i, of 32 up to 128, in integers: 8 exact ones, then two an octave."""
    size = np.abs(distance)
    far = sum((size * size >= 64 * 2**k).astype(int) for k in range(1, 8))
    return np.where(distance > 0, 16, 0) + np.where(size < 8, size, 8 + far)


def learned_of(score: str, at: Scene, dtype: str) -> dict[str, np.ndarray]:
    """The arrays of a case's scores, by the names used here."""
    shapes = {
        "bias": (*at.batch, N, at.T, at.S), "bias_of_keys": (at.S,),
        "bias_of_heads": (N, 1, at.S), "bias_of_rows": (*at.batch, 1, 1, at.S),
        "all_scores": (at.T, at.S),
    }  # fmt: skip
    learned: dict[str, Any] = {}
    if score in shapes:
        kind = dtype if score == "bias_of_heads" else "float32"
        learned["bias"] = jnp.asarray(at.rng.normal(size=shapes[score]), kind)
    if score in ("alibi", "all_scores"):
        learned["slopes"] = np.array([0.5, 0.25, 0.1, 0.0], np.float32)
    if score in ("t5", "all_scores"):
        learned["biases"] = at.rng.normal(size=(N, 32)).astype(np.float32)
    if score in ("sinks", "all_scores"):
        learned["sinks"] = SINKS
    return learned


def mods_of(score: str, learned: dict[str, jax.Array]) -> tuple[ScoreMod, ...]:
    mods: list[ScoreMod] = [SoftCap(CAP)] if score in ("cap", "all_scores") else []
    mods += [Alibi(learned["slopes"])] if "slopes" in learned else []
    mods += [RelativeBias(learned["biases"])] if "biases" in learned else []
    mods += [Bias(learned["bias"])] if score == "bias_of_heads" else []
    return tuple(mods)


def bias_of(at: Scene, learned: dict[str, np.ndarray]) -> np.ndarray | None:
    """What the scores add up to, over all rows, heads, queries and keys."""
    total = at.table(np.zeros((1, 1, 1, 1)))
    if "bias" in learned:
        total = total + oracle.float64(learned["bias"])
    if "slopes" in learned:
        total = total - at.table(learned["slopes"][:, None, None] * np.abs(at.i - at.j))
    if "biases" in learned:
        total = total + at.table(learned["biases"][at.head, bucket_of(at.j - at.i)])
    return total if learned.keys() - {"sinks"} else None


def learned_gradients(
    at: Scene, learned: dict[str, np.ndarray], exact: oracle.Gradients
) -> dict[str, np.ndarray]:
    """The gradients of the scores' arrays from that of their sum."""
    found = {} if exact.sinks is None else {"sinks": exact.sinks}
    if exact.bias is None:
        return found
    rows = exact.bias.reshape(at.rows, N, at.T, at.S)
    if "bias" in learned:
        found["bias"] = oracle.summed_to(exact.bias, learned["bias"].shape)
    if "slopes" in learned:
        found["slopes"] = -(rows * np.abs(at.i - at.j)).sum((0, 2, 3))
    if "biases" in learned:
        place = np.broadcast_to(32 * at.head + bucket_of(at.j - at.i), rows.shape)
        sums = np.bincount(place.ravel(), rows.ravel(), 32 * N)
        found["biases"] = sums.reshape(N, 32)
    return found


class Problem(NamedTuple):
    """A call, and the truth about it.

    Attributes:
      qkv: the operands.
      cotangents: of out and lse.
      learned: arrays of scores, that take gradients.
      given: mask, q_positions and kv_positions.
      call: further arguments from the learned arrays.
      truth: out, lse and gradients by name, in float64.
    """

    qkv: tuple[jax.Array, ...]
    cotangents: tuple[jax.Array, jax.Array]
    learned: dict[str, Any]
    given: tuple[Any, Any, Any]
    call: Callable[[dict[str, jax.Array]], dict[str, Any]]
    truth: dict[str, np.ndarray]


@functools.lru_cache(maxsize=4)
def problem_of(case: Case) -> Problem:
    *batch, T, S = (int(n) for n in case.size.split("x") if n)
    at = Scene(tuple(batch), T, S, case.place, zlib.crc32(str(case).encode()))
    mask, allowed = (None, None) if case.mask == "none" else MASKS[case.mask](at)
    return pose(at, mask, None if allowed is None else at.table(allowed), case)


def pose(at: Scene, mask: Mask | None, allowed: np.ndarray | None, case: Case) -> Problem:
    """The problem of that mask, whose table is known."""
    K, Hv = HEADS[case.heads]
    sizes = [(at.T, N, H), (at.S, K, H), (at.S, K, Hv), (at.T, N, Hv)]
    q, k, v, dout = (at.rng.normal(size=(*at.batch, *size)) for size in sizes)
    q = 4 * q if case.score in ("cap", "all_scores") else q
    operands = tuple(jnp.asarray(x, case.dtype) for x in (q, k, v, dout))
    dlse = jnp.asarray(at.rng.normal(size=(*at.batch, N, at.T)), jnp.float32)
    learned = learned_of(case.score, at, case.dtype)

    known: dict[str, Any] = {"allowed": allowed, "bias": bias_of(at, learned)}
    known |= {"sinks": learned.get("sinks")}
    known |= {"cap": CAP} if case.score in ("cap", "all_scores") else {}
    dropout: dict[str, Any] = {}
    if case.dropout != "no_dropout":
        dropout = {"dropout_rate": RATE, "dropout_rng": jax.random.key(KEY)}
        dropout["broadcast_dropout"] = case.dropout == "dropout_broadcast"
        known |= {"rate": RATE, "keep": at.table(kept(at, dropout["broadcast_dropout"]))}

    def call(learned: dict[str, jax.Array]) -> dict[str, Any]:
        arrays = {"sinks": learned.get("sinks"), "scores": mods_of(case.score, learned)}
        plain = "bias" in learned and case.score != "bias_of_heads"
        return arrays | dropout | ({"bias": learned["bias"]} if plain else {})

    out, lse, _ = oracle.attention(*operands[:3], **known)
    exact = oracle.attention_gradients(
        *operands[:3], cotangent=operands[3], lse_cotangent=dlse, **known
    )
    truth = {"out": out, "lse": lse, "q": exact.q, "k": exact.k, "v": exact.v}
    truth |= learned_gradients(at, learned, exact)
    # A number is the other way to say that positions count from it.
    ends = case.place == "aligned" and case.given == "known"
    q_positions = at.S - at.T if ends else at.q_positions
    given = (mask, q_positions, at.kv_positions)
    return Problem(operands[:3], (operands[3], dlse), learned, given, call, truth)


@functools.partial(jax.jit, static_argnums=0)
def _keep(broadcast: bool, *coordinates: jax.Array) -> jax.Array:
    return Dropout.from_key(jax.random.key(KEY), RATE, broadcast).keep(*coordinates)


def kept(at: Scene, broadcast: bool) -> np.ndarray:
    """The weights that dropout leaves; tests of dropout say what the pattern must be."""
    return np.asarray(_keep(broadcast, at.row, at.head[None], at.i, at.j))
