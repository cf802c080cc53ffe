"""Written dates in many languages, from the CLDR formats that Babel brings along, and ISO dates."""

import datetime
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from babel import Locale
from babel.dates import format_date

# Latin, Cyrillic, Greek, Han, Hangul, Arabic, Devanagari.
LOCALES = ("en_US", "de", "fr", "es", "it", "pl", "ru", "el", "ja", "ko", "ar_EG", "hi")
LENGTHS = ("short", "medium", "long", "full")
FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
# What two digits of a year mean: POSIX's rule, which Python's strptime has too.
TWO_DIGITS = datetime.date(1969, 1, 1), datetime.date(2068, 12, 31)
HELD_OUT_DATES = 2_000
TESTED, TESTED_UNSEEN = 1_000, 500
SPLIT_SEED = 0  # A constant, so that every run, resumed or new, holds out the same dates.

Pair = tuple[str, str]  # a source and its target


class Style(NamedTuple):
    """A locale's way of writing dates, of one of the CLDR's four lengths."""

    locale: str
    length: str

    def write(self, date: datetime.date) -> str:
        """The date so written."""
        return format_date(date, self.length, self.locale)

    def range(self) -> tuple[datetime.date, datetime.date]:
        """The first and the last date that it writes without doubt."""
        pattern = Locale.parse(self.locale).date_formats[self.length].pattern
        return TWO_DIGITS if re.search(r"(?<!y)yy(?!y)", pattern) else (FIRST, LAST)


# Everywhere else the day stands before the month if the year does not come first.
AMBIGUOUS = {Style("en_US", "short")}
STYLES = tuple(
    style for style in (Style(a, b) for a in LOCALES for b in LENGTHS) if style not in AMBIGUOUS
)
UNSEEN = Style("it", "full")  # never trained on


class Written(Sequence[Pair]):
    """All of some dates in all of some styles, written when asked for.

    Args:
      dates: proleptic ordinals [n], sorted.
      styles: the styles.
    """

    def __init__(self, dates: np.ndarray, styles: Sequence[Style]) -> None:
        self.styles = styles
        self._dates = []
        for style in styles:
            first, last = style.range()
            inside = (first.toordinal() <= dates) & (dates <= last.toordinal())
            self._dates.append(dates[inside])
        self._ends = np.cumsum([len(each) for each in self._dates])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]
        at = int(np.searchsorted(self._ends, index, side="right"))
        ordinal = self._dates[at][index - self._ends[at]]
        date = datetime.date.fromordinal(int(ordinal))
        return self.styles[at].write(date), date.isoformat()

    def some(self, count: int, rng: np.random.Generator) -> list[Pair]:
        """So many of them, drawn without replacement."""
        return [self[i] for i in rng.permutation(len(self))[:count]]


class Split(NamedTuple):
    """What is learnt from, and what is asked.

    Attributes:
      train: pairs.
      sample: some of them, with every character and the longest.
      test: pairs of dates that are not among those of `train`.
      unseen: the same in a style that is not either.
    """

    train: Sequence[Pair]
    sample: Sequence[Pair]
    test: Sequence[Pair]
    unseen: Sequence[Pair]


def load() -> Split:
    """The dates of 1900 to 2099, of which 2,000 are held out in every style."""
    rng = np.random.default_rng(SPLIT_SEED)
    order = rng.permutation(np.arange(FIRST.toordinal(), LAST.toordinal() + 1))
    held, rest = np.sort(order[:HELD_OUT_DATES]), np.sort(order[HELD_OUT_DATES:])
    seen = [style for style in STYLES if style != UNSEEN]
    # A leap year has every month, weekday and number of a day.
    year = rest[np.isin(rest, [datetime.date(2000, 1, 1).toordinal() + i for i in range(366)])]
    return Split(
        train=Written(rest, seen),
        sample=list(Written(year, seen)),
        test=Written(held, seen).some(TESTED, rng),
        unseen=Written(held, [UNSEEN]).some(TESTED_UNSEEN, rng),
    )
