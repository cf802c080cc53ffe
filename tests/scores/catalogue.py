"""Every score function with its rule in NumPy: the one table of scores for all tests.

All else follows from the rows: the kernels' contract with gradients, laws of dtypes, layers in
every mode, and odd calls.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flax_mha.scores import (
    Alibi,
    Bias,
    Relative,
    RelativeBias,
    Score,
    ScoreMod,
    SoftCap,
    TransformerXL,
)
from tests.masks.catalogue import Scene
from tests.support.oracle import Array, ScoreRule

CAP, REACH, BASE = 1.5, 3, 10_000.0


class Row(NamedTuple):
    """A score function of the package with its equation in NumPy.

    Attributes:
      make: the score function of its arrays by name, or without arrays one that a layer can have.
      value: the new scores of s [R, N, T, S], the scene and the arrays. Of a function of vectors it
        gets the arrays `q` and `k` too.
      pullback: the cotangent of s, and the arrays' gradients, of the cotangent of the new scores,
        s, the scene and the arrays. None: no kernel's contract has this function.
      arrays: functions of a scene to the arrays, by name.
      params: the names of a layer's parameters, by array.
    """

    make: Callable[..., ScoreMod]
    value: Callable[..., Array]
    pullback: Callable[..., tuple[Array, dict[str, Array]]] | None = None
    arrays: Mapping[str, Callable[[Scene], Array]] = {}
    params: Mapping[str, str] = {}

    def of_layer(self, at: Scene) -> ScoreMod:
        """Return the function for a layer, which makes the arrays that are parameters."""
        arrays = {} if self.params else {name: make(at) for name, make in self.arrays.items()}
        return self.make(**arrays)


def bucket_of(distance: Array) -> Array:
    """Return T5's bucket of j − i (32 buckets up to 128): 8 exact ones, then two per octave."""
    size = np.abs(distance)
    far = sum((size * size >= 64 * 2**k).astype(int) for k in range(1, 8))
    return np.where(distance > 0, 16, 0) + np.where(size < 8, size, 8 + far)


def t5_gradient(ds: Array, s: Array, at: Scene, table: Array) -> tuple[Array, dict[str, Array]]:
    place = np.broadcast_to(32 * at.head + bucket_of(at.j - at.i), ds.shape)
    return ds, {"table": np.bincount(place.ravel(), ds.ravel(), table.size).reshape(table.shape)}


def alibi(s: Array, at: Scene, slopes: Array | None = None) -> Array:
    slopes = 2.0 ** (-8 * np.arange(1, at.N + 1) / at.N) if slopes is None else slopes
    return s - slopes[:, None, None] * np.abs(at.i - at.j)


def wave(row: Any, head: Any, i: Any, j: Any) -> Any:
    return (i - 2 * j + head + row) % 5 - 2


def user_score(s: Any, row: Any, head: Any, i: Any, j: Any, w: Any) -> Any:
    return s + w * wave(row, head, i, j).astype(w.dtype)


def shaw(s: Array, at: Scene, q: Array, k: Array, table: Array) -> Array:
    rows = table[np.clip(at.j - at.i, -REACH, REACH)[0, 0] + REACH]
    return s + np.einsum("tnh,tsh->nts", q, rows) / np.sqrt(q.shape[-1])


def transformer_xl(
    s: Array, at: Scene, q: Array, k: Array, content_bias: Array, position_bias: Array,
    kernel: Array,
) -> Array:  # fmt: skip
    angles = (at.i - at.j)[0, 0, ..., None] * BASE ** (-2 * np.arange(3) / 6)
    r = np.einsum("tsd,dnh->tsnh", np.concatenate([np.sin(angles), np.cos(angles)], -1), kernel)
    by_position = np.einsum("tnh,tsnh->nts", q + position_bias, r)
    by_content = np.einsum("nh,snh->ns", content_bias, k)[:, None]
    return s + (by_position + by_content) / np.sqrt(q.shape[-1])


_SOFT_CAP = ScoreRule.soft_cap(CAP)
SCORES: dict[str, Row] = {
    "cap": Row(
        lambda: SoftCap(CAP),
        lambda s, at: _SOFT_CAP.value(s),
        lambda ds, s, at, sign: _SOFT_CAP.pullback(ds, s, sign),
    ),
    "alibi": Row(
        Alibi, alibi,
        lambda ds, s, at, sign, slopes: (
            ds, {"slopes": -(ds * np.abs(at.i - at.j)).sum((0, 2, 3))}
        ),
        {"slopes": lambda at: np.linspace(0.5, 0, at.N, dtype=np.float32)},
    ),
    "t5": Row(
        RelativeBias,
        lambda s, at, table: s + table[at.head, bucket_of(at.j - at.i)],
        lambda ds, s, at, sign, table: t5_gradient(ds, s, at, table),
        {"table": lambda at: at.rng.normal(size=(at.N, 32)).astype(np.float32)},
        {"table": "relative_bias"},
    ),
    "bias_of_heads": Row(
        Bias,
        lambda s, at, array: s + array[..., : at.S],
        lambda ds, s, at, sign, array: (ds, {"array": ds.sum((0, 2))[:, None]}),
        {"array": lambda at: at.rng.normal(size=(at.N, 1, at.S)).astype(np.float32)},
    ),
    "user": Row(
        lambda w: Score(user_score, (w,)),
        lambda s, at, w: user_score(s, at.row, at.head, at.i, at.j, w),
        lambda ds, s, at, sign, w: (ds, {"w": (ds * wave(at.row, at.head, at.i, at.j)).sum()}),
        {"w": lambda at: np.array(0.5, np.float32)},
    ),
    "relative": Row(
        lambda: Relative(max_distance=REACH), shaw, params={"table": "relative_keys"}
    ),
    "transformer_xl": Row(
        lambda: TransformerXL(features=6), transformer_xl,
        params={name: f"relative_{name}" for name in ("content_bias", "position_bias", "kernel")},
    ),
}  # fmt: skip
