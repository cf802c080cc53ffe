"""Every mask with its rule in NumPy, at any coordinates: the one table of masks for all tests.

A row is a function of a `Scene` that returns a mask and the pairs that it allows, written from the
definition. All else follows from the rows: the kernels' contract and random expressions of masks,
laws of dtypes, layers in every mode, odd calls, and docs/kernels.md.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flax_mha.masks import (
    AtLeast,
    BlockSparse,
    Causal,
    Dense,
    Dilated,
    Documents,
    Keys,
    Lengths,
    Mask,
    Neighborhood,
    PerHead,
    Predicate,
    Prefix,
    Segments,
)
from flax_mha.masks import Window as Near


class Scene:
    """Coordinates of the scores of R batch rows, [R|1, N|1, T|1, S|1], and arrays over them.

    Attributes:
      place: where queries and keys stand: "from_0", "aligned" at their ends, or "scattered".
    """

    def __init__(
        self, batch: tuple[int, ...], T: int, S: int, place: str = "from_0", seed: int = 0,
        N: int = 4,
    ) -> None:  # fmt: skip
        self.rng = np.random.default_rng(seed)
        self.batch, self.N, self.T, self.S, self.rows = batch, N, T, S, math.prod(batch)
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
        """Return the numbers shaped to broadcast: [*batch], or per query (axis 3) or key (axis
        2).
        """
        rows = self.rows if x.ndim > 1 or axis == 0 else 1
        return x.reshape(rows, 1, *{0: (1, 1), 2: (1, -1), 3: (-1, 1)}[axis])

    def table(self, allowed: np.ndarray) -> np.ndarray:
        """Return the table [*batch, N, T, S]."""
        whole = np.broadcast_to(allowed, (self.rows, self.N, self.T, self.S))
        return whole.reshape(*self.batch, self.N, self.T, self.S)

    def lengths(self, most: int, shape: tuple[int, ...] = ()) -> np.ndarray:
        """Return numbers up to most, [*batch, *shape]. The last is 0 if there are several."""
        x = np.asarray(self.rng.integers(0, most + 1, (*self.batch, *shape)))
        x.flat[x.size - 1 :] = 0 if x.size > 1 else x
        return x

    def reach(self, most: int) -> int:
        """Return a distance for windows, shorter where there are few keys."""
        return min(most, self.S // 3 + 1)

    def ids(self, length: int) -> np.ndarray:
        """Return sorted segment ids [*batch, length]."""
        return np.sort(self.rng.integers(0, 4, (*self.batch, length)))


def lengths(at: Scene) -> tuple[Mask, np.ndarray]:
    kv = at.lengths(at.S)
    return Lengths(kv), at.j < at.over(kv, 0)


def window(at: Scene) -> tuple[Mask, np.ndarray]:
    left, right = at.reach(20), at.reach(3)
    return Near(left, right), (at.i - left <= at.j) & (at.j <= at.i + right)


def window_left(at: Scene) -> tuple[Mask, np.ndarray]:
    left = at.reach(100)
    return Near(left=left), at.i - left <= at.j


def window_of_rows(at: Scene) -> tuple[Mask, np.ndarray]:
    left, right = at.lengths(at.S), at.reach(5)
    return Near(left, right), (at.i - at.over(left, 0) <= at.j) & (at.j <= at.i + right)


def lengths_of_both(at: Scene) -> tuple[Mask, np.ndarray]:
    kv, q = at.lengths(at.S) + 1, at.lengths(at.T) + 1 + np.min(at.i)
    return Lengths(kv, q), (at.j < at.over(kv, 0)) & (at.i < at.over(q, 0))


def length(at: Scene) -> tuple[Mask, np.ndarray]:
    """Return a mask by one length for all rows."""
    n = np.array(at.S * 2 // 3, np.int32)
    return Causal() & Lengths(n, 2 * n), (at.j <= at.i) & (at.j < n) & (at.i < 2 * n)


def lengths_per_query(at: Scene) -> tuple[Mask, np.ndarray]:
    kv = at.lengths(at.S, (at.T,))
    return Lengths(kv), at.j < at.over(kv, 3)


def segments(at: Scene) -> tuple[Mask, np.ndarray]:
    q, kv = at.ids(at.T), at.ids(at.S)
    return Segments(q, kv), at.over(q, 3) == at.over(kv, 2)


def at_least(at: Scene) -> tuple[Mask, np.ndarray]:
    q, kv = at.ids(at.T), at.ids(at.S)
    return AtLeast(q, kv), at.over(q, 3) >= at.over(kv, 2)


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
    table = at.rng.random((*at.batch, at.N, at.T, at.S)) < 0.2
    return Dense(table), table.reshape(-1, *table.shape[-3:])


def dense_of_keys(at: Scene) -> tuple[Mask, np.ndarray]:
    table = at.rng.random((*at.batch, 1, 1, at.S)) < 0.7
    return Keys(table[..., 0, 0, :]), table.reshape(-1, 1, 1, at.S)


def dense_in_blocks(at: Scene) -> tuple[Mask, np.ndarray]:
    """Return a mask of empty, full and mixed tiles, the same for all rows and heads."""
    coarse = at.rng.random((at.T // 40 + 1, at.S // 40 + 1)) < 0.4
    table = np.kron(coarse, np.ones((40, 40), bool))[: at.T, : at.S] > 0
    return Dense(table), table


def predicate(at: Scene) -> tuple[Mask, np.ndarray]:
    def rule(row: Any, head: Any, i: Any, j: Any, m: Any) -> Any:
        return (i + j + head + row) % m == 0

    return Predicate(rule, (np.array(3, np.int32),)), rule(at.row, at.head, at.i, at.j, 3)


def dilated(at: Scene) -> tuple[Mask, np.ndarray]:
    left, step = at.reach(90), 3 if at.S < 16 else 7
    near = (at.i - left <= at.j) & (at.j <= at.i)
    return Near(left, 0) & Dilated(step), near & ((at.i - at.j) % step == 0)


def neighborhood(at: Scene) -> tuple[Mask, np.ndarray]:
    """Return a neighborhood mask of a small video, or of an image of 20 × 30 tokens."""
    is_small = max(at.T, at.S) <= 16
    sizes, window = ((2, 2, 4), (2, 1, 2)) if is_small else ((20, 30), (3, 8))
    allowed, stride = np.array(True), math.prod(sizes)
    for size, width in zip(sizes, window, strict=True):
        stride //= size
        q, k = (x // stride % size for x in (at.i, at.j))
        first = np.minimum(np.maximum(q - width // 2, 0), size - width)
        allowed = allowed & (first <= k) & (k < first + width)
    return Neighborhood(sizes, window), allowed


def documents(at: Scene) -> tuple[Mask, np.ndarray]:
    lengths = at.rng.integers(0, min(60, at.S), (*at.batch, 5))
    ends = np.cumsum(lengths, -1).reshape(-1, 1, 1, 1, 5)
    q, k = ((x[..., None] >= ends).sum(-1) for x in (at.i, at.j))
    return Documents(lengths), q == k


def chosen(at: Scene) -> tuple[Mask, np.ndarray]:
    """Return a mask with some blocks of keys for each block of queries, repeated and beyond."""
    q, k = (int(n) for n in at.rng.choice([(24, 40), (64, 128), (1, 5)]))
    blocks = at.rng.integers(-1, at.S // k + 2, (*at.batch, at.N, -(-at.T // q), 3))
    each = np.repeat(blocks.reshape(at.rows, at.N, -1, 3), q, 2)[:, :, : at.T]
    return BlockSparse(blocks, q, k), (at.j[..., None] // k == each[:, :, :, None]).any(-1)


def per_head(at: Scene) -> tuple[Mask, np.ndarray]:
    """Return one of four masks for each head in turn."""
    size, (mask, table) = at.reach(4), dense(at)
    near, future = np.abs(at.i - at.j) <= size, at.j > at.i
    pairs = (Causal(), ~future), (Near(size, size), near), (~Causal(), future), (mask, table)
    each = [pairs[n % len(pairs)] for n in range(at.N)]
    tables = [at.table(x).reshape(at.rows, at.N, at.T, at.S)[:, n] for n, (_, x) in enumerate(each)]
    return PerHead([mask for mask, _ in each]), np.stack(tables, 1)


def mixed(at: Scene) -> tuple[Mask, np.ndarray]:
    mask, same = segments(at)
    other, short = lengths(at)
    right = at.reach(9)
    near = (at.i <= at.j) & (at.j <= at.i + right)
    return (Causal() | Near(0, right)) & ~(mask & other), ((at.j <= at.i) | near) & ~(same & short)


MASKS: dict[str, Callable[[Scene], tuple[Mask, np.ndarray]]] = {
    "causal": lambda at: (Causal(), at.j <= at.i),
    "window": window, "window_left": window_left,
    "window_of_rows": window_of_rows, "lengths": lengths, "length": length,
    "lengths_of_both": lengths_of_both,
    "lengths_per_query": lengths_per_query, "segments": segments, "at_least": at_least,
    "packed": packed,
    "prefix": prefix, "prefix_per_row": prefix_per_row, "dense": dense,
    "dense_of_keys": dense_of_keys, "dense_in_blocks": dense_in_blocks, "predicate": predicate,
    "per_head": per_head, "mixed": mixed, "dilated": dilated, "neighborhood": neighborhood,
    "documents": documents, "chosen": chosen,
}  # fmt: skip
