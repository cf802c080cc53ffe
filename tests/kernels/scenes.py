"""Coordinates for the contract's calls, and masks by name.

Each mask is written twice: as the library's value, and in NumPy from its definition.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flax_mha.masks import (
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

N = 4


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
        """Return the numbers shaped to broadcast: [*batch], or per query (axis 3) or key (axis
        2).
        """
        rows = self.rows if x.ndim > 1 or axis == 0 else 1
        return x.reshape(rows, 1, *{0: (1, 1), 2: (1, -1), 3: (-1, 1)}[axis])

    def table(self, allowed: np.ndarray) -> np.ndarray:
        """Return the table [*batch, N, T, S]."""
        whole = np.broadcast_to(allowed, (self.rows, N, self.T, self.S))
        return whole.reshape(*self.batch, N, self.T, self.S)

    def lengths(self, most: int, shape: tuple[int, ...] = ()) -> np.ndarray:
        """Return numbers up to most, [*batch, *shape]. The last is 0 if there are several."""
        x = np.asarray(self.rng.integers(0, most + 1, (*self.batch, *shape)))
        x.flat[x.size - 1 :] = 0 if x.size > 1 else x
        return x

    def ids(self, length: int) -> np.ndarray:
        """Return sorted segment ids [*batch, length]."""
        return np.sort(self.rng.integers(0, 4, (*self.batch, length)))


def lengths(at: Scene) -> tuple[Mask, np.ndarray]:
    kv = at.lengths(at.S)
    return Lengths(kv), at.j < at.over(kv, 0)


def window_of_rows(at: Scene) -> tuple[Mask, np.ndarray]:
    left = at.lengths(at.S)
    return Near(left, 5), (at.i - at.over(left, 0) <= at.j) & (at.j <= at.i + 5)


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
    """Return a mask of empty, full and mixed tiles, the same for all rows and heads."""
    coarse = at.rng.random((at.T // 40 + 1, at.S // 40 + 1)) < 0.4
    table = np.kron(coarse, np.ones((40, 40), bool))[: at.T, : at.S] > 0
    return Dense(table), table


def predicate(at: Scene) -> tuple[Mask, np.ndarray]:
    def rule(row: Any, head: Any, i: Any, j: Any, m: Any) -> Any:
        return (i + j + head + row) % m == 0

    return Predicate(rule, (np.array(3, np.int32),)), rule(at.row, at.head, at.i, at.j, 3)


def dilated(at: Scene) -> tuple[Mask, np.ndarray]:
    return Near(90, 0) & Dilated(7), ((at.i - at.j) % 7 == 0) & (at.i - 90 <= at.j) & (at.j <= at.i)


def neighborhood(at: Scene) -> tuple[Mask, np.ndarray]:
    """Return a neighborhood mask on an image of 20 × 30 tokens."""
    mask, allowed = Neighborhood((20, 30), (3, 8)), True
    for size, window, stride in ((20, 3, 30), (30, 8, 1)):
        q, k = (x // stride % size for x in (at.i, at.j))
        first = np.minimum(np.maximum(q - window // 2, 0), size - window)
        allowed = allowed & (first <= k) & (k < first + window)
    return mask, allowed


def documents(at: Scene) -> tuple[Mask, np.ndarray]:
    lengths = at.rng.integers(0, 60, (*at.batch, 5))
    ends = np.cumsum(lengths, -1).reshape(-1, 1, 1, 1, 5)
    q, k = ((x[..., None] >= ends).sum(-1) for x in (at.i, at.j))
    return Documents(lengths), q == k


def chosen(at: Scene) -> tuple[Mask, np.ndarray]:
    """Return a mask with some blocks of keys for each block of queries, repeated and beyond."""
    q, k = (int(n) for n in at.rng.choice([(24, 40), (64, 128), (1, 5)]))
    blocks = at.rng.integers(-1, at.S // k + 2, (*at.batch, N, -(-at.T // q), 3))
    each = np.repeat(blocks.reshape(at.rows, N, -1, 3), q, 2)[:, :, : at.T]
    return BlockSparse(blocks, q, k), (at.j[..., None] // k == each[:, :, :, None]).any(-1)


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
    "window_of_rows": window_of_rows, "lengths": lengths, "length": length,
    "lengths_of_both": lengths_of_both,
    "lengths_per_query": lengths_per_query, "segments": segments, "packed": packed,
    "prefix": prefix, "prefix_per_row": prefix_per_row, "dense": dense,
    "dense_of_keys": dense_of_keys, "dense_in_blocks": dense_in_blocks, "predicate": predicate,
    "per_head": per_head, "mixed": mixed, "dilated": dilated, "neighborhood": neighborhood,
    "documents": documents, "chosen": chosen,
}  # fmt: skip
