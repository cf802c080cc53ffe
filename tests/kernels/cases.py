"""The calls of the kernels' contract: a table of factors, and rows that cover it.

The product of the factors has far more rows than could run. Mistakes need two or three factors to
meet, so the ordinary rows cover every pair of values, and with the grid every triple. A run takes a
few of the rows, and 30 days of `.ci/run` take all (`tests/support/draw.py`).
"""

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_mha import explain, kernels
from tests.masks.catalogue import MASKS
from tests.scores.catalogue import SCORES

_PLAIN = (jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.float32),) * 3
# The kernels that run here; the ones for other devices have their own tests.
KERNELS = tuple(name for name in kernels.KERNELS if name not in explain(*_PLAIN).refused)

FACTORS: dict[str, tuple[str, ...]] = {
    "mask": ("none", *MASKS),
    # Batch, then T and S.
    "size": (
        "2x1x1", "2x7x7", "2x64x64", "2x129x129", "2x257x257", "1x600x600",
        "2x257x129", "2x100x300", "2x1x300", "x300x7", "2x2x64x129",
    ),
    "score": (
        "plain", "bias", "bias_of_keys", "bias_of_rows", "sinks",
        *(name for name, row in SCORES.items() if row.pullback), "all_scores",
    ),
    # Scores of a few units, or up to ±50: then most queries give all weight to one key.
    "spread": ("soft", "sharp"),
    "heads": ("mha", "gqa", "mqa", "dv"),
    "dtype": ("float32", "bfloat16", "float16"),
    "dropout": ("no_dropout", "dropout", "dropout_broadcast"),
    # Positions of queries and keys: from 0, with aligned ends, or anywhere.
    "place": ("from_0", "aligned", "scattered"),
    # Masks and positions are static or traced.
    "given": ("known", "traced"),
    "scale": ("default", "number", "array"),
    # How the call is run; "x64" is `jit` where Python's numbers are 64 bits wide.
    "way": ("jit", "remat", "vmap", "scan", "shard_map", "x64"),
}  # fmt: skip


class Case(NamedTuple):
    """A choice of one value for each factor."""

    mask: str
    size: str
    score: str
    spread: str
    heads: str
    dtype: str
    dropout: str
    place: str
    given: str
    scale: str = "default"
    way: str = "jit"

    def __str__(self) -> str:
        return "-".join(self)


Tuples = set[tuple[tuple[int, str], ...]]


def tuples_of(row: Sequence[str], strength: int) -> Iterator[tuple[tuple[int, str], ...]]:
    """Return the combinations of `strength` values in a row, each value with its factor's index."""
    return itertools.combinations(enumerate(row), strength)


def all_tuples(factors: Mapping[str, Sequence[str]], strength: int) -> Tuples:
    """Return the combinations that some row has."""
    columns = [[(n, value) for value in values] for n, values in enumerate(factors.values())]
    return {
        combination
        for some in itertools.combinations(columns, strength)
        for combination in itertools.product(*some)
    }


def covering(
    factors: Mapping[str, Sequence[str]], strengths: Sequence[int]
) -> Iterator[Sequence[str]]:
    """Yield rows that cover all combinations of each strength in turn, by a greedy choice."""
    draw = random.Random(0)
    missing = {strength: all_tuples(factors, strength) for strength in strengths}
    for strength in strengths:
        # Sorted: the order must not depend on hashes.
        for seed in sorted(missing[strength]):
            while seed in missing[strength]:
                row = _best(dict(seed), missing[strength], strength, draw, [*factors.values()])
                for other in strengths:
                    missing[other].difference_update(tuples_of(row, other))
                yield row


def _best(
    row: dict[int, str], missing: Tuples, strength: int, draw: random.Random,
    columns: Sequence[Sequence[str]],
) -> list[str]:  # fmt: skip
    """Complete a row, choosing for each factor the value that covers most missing combinations."""
    free = [n for n in range(len(columns)) if n not in row]
    draw.shuffle(free)
    for n in free:
        others = list(itertools.combinations(sorted(row.items()), strength - 1))

        def gain(value: str, n: int = n, others: list = others) -> int:
            return sum(tuple(sorted((*other, (n, value)))) in missing for other in others)

        row[n] = max(draw.sample(columns[n], len(columns[n])), key=gain)
    return [row[n] for n in range(len(columns))]


def pairs(**factors: Sequence[Any]) -> list[Sequence[Any]]:
    """Return rows that cover all pairs of values, for tests whose whole product would be long."""
    return [*covering(factors, (2,))]


@functools.cache
def ordinary() -> list[Case]:
    """Return rows that cover every pair of values, in as few as a greedy choice finds."""
    return [Case(*row) for row in covering(FACTORS, (2,))]


@functools.cache
def grid() -> list[Case]:
    """Return the other rows. With the ordinary ones they cover every triple of values."""
    # The greedy choice begins with the rows of the ordinary suite.
    rows = covering(FACTORS, (2, 3))
    return [Case(*row) for row in itertools.islice(rows, len(ordinary()), None)]
