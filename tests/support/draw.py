"""A draw of cases that changes with a seed, so that all have had their turn after some days."""

import math
import random
from collections.abc import Sequence
from typing import TypeVar

Name = TypeVar("Name")
# Seeds in a row, one a day, that take every case of a test.
DAYS = 30


def draw(
    cases: Sequence[Name], share: float, seed: int, order: str
) -> tuple[list[Name], list[Name]]:
    """Return the cases of an ordinary run, and those that a slow run adds.

    The cases lie on a circle, shuffled, so that a stretch of it is spread over the factors of a
    table. Each seed takes the stretch that follows that of the seed before it. A stretch is long
    enough to go round in `DAYS`. Its length is exact on average: a third of one test is that test
    every third day.

    Args:
      cases: all cases of a test, in the order of its table.
      share: the share of an ordinary run.
      seed: the number of the stretch, such as a day.
      order: the name of the test, from which the shuffled order follows.
    """
    # A day to spare, for rounding.
    rate = max(share, 1 / (DAYS - 1))
    chance = random.Random(order)
    circle = chance.sample(cases, len(cases))
    # Else all tests of equal shares would have their turn on the same days.
    phase = chance.randrange(DAYS)
    start, end = (math.floor(rate * len(cases) * day) for day in (seed + phase, seed + phase + 1))
    stretch = [circle[n % len(circle)] for n in range(start, end)]
    # A circle of few stretches repeats them: each time others of the stretch are in the fast run.
    random.Random(f"{order} {seed}").shuffle(stretch)
    fast = math.floor(end * share / rate) - math.floor(start * share / rate)
    return stretch[:fast], stretch[fast:]
