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
# The years that two digits mean: POSIX's rule, which Python's strptime has too.
TWO_DIGITS = datetime.date(1969, 1, 1), datetime.date(2068, 12, 31)
HELD_OUT_DATES = 2_000
TESTED, TESTED_UNSEEN = 1_000, 500

Pair = tuple[str, str]  # a source and its target


class Style(NamedTuple):
    """A locale's way of writing dates, of one of the CLDR's four lengths."""

    locale: str
    length: str

    def write(self, date: datetime.date) -> str:
        """Return a date as text."""
        return format_date(date, self.length, self.locale)

    def range(self) -> tuple[datetime.date, datetime.date]:
        """Return the first and the last date whose text has one meaning."""
        pattern = Locale.parse(self.locale).date_formats[self.length].pattern
        return TWO_DIGITS if re.search(r"(?<!y)yy(?!y)", pattern) else (FIRST, LAST)


# Everywhere but in "en_US", "short" the day stands before the month, or the year comes first.
STYLES = tuple(Style(a, b) for a in LOCALES for b in LENGTHS if (a, b) != ("en_US", "short"))
UNSEEN = Style("it", "full")  # never trained on


class Written(Sequence[Pair]):
    """All pairs of some dates (ordinals [n], sorted) in some styles, written when asked for."""

    def __init__(self, dates: np.ndarray, styles: Sequence[Style]) -> None:
        self.styles, self._dates = styles, []
        for style in styles:
            first, last = (date.toordinal() for date in style.range())
            self._dates.append(dates[(first <= dates) & (dates <= last)])
        self._ends = np.cumsum([len(each) for each in self._dates])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]
        at = int(np.searchsorted(self._ends, index, side="right"))
        date = datetime.date.fromordinal(int(self._dates[at][index - self._ends[at]]))
        return self.styles[at].write(date), date.isoformat()

    def some(self, count: int, rng: np.random.Generator) -> list[Pair]:
        """Return a number of pairs, drawn without replacement."""
        return [self[i] for i in rng.permutation(len(self))[:count]]


class Split(NamedTuple):
    """Pairs to learn from, and pairs to ask."""

    train: Sequence[Pair]
    sample: Sequence[Pair]  # some of `train`, with every character and the longest
    test: Sequence[Pair]  # of dates that are not in `train`
    unseen: Sequence[Pair]  # of such dates, in a style that is not in `train` either


def load() -> Split:
    """Return the dates of 1900 to 2099, 2,000 of them held out in every style."""
    rng = np.random.default_rng(0)  # so that every run, resumed or new, holds out the same dates
    order = rng.permutation(np.arange(FIRST.toordinal(), LAST.toordinal() + 1))
    held, rest = np.sort(order[:HELD_OUT_DATES]), np.sort(order[HELD_OUT_DATES:])
    seen = [style for style in STYLES if style != UNSEEN]
    # A leap year has every month, weekday and number of a day.
    year = rest[np.isin(rest, [datetime.date(2000, 1, 1).toordinal() + i for i in range(366)])]
    return Split(
        train=Written(rest, seen), sample=list(Written(year, seen)),
        test=Written(held, seen).some(TESTED, rng),
        unseen=Written(held, [UNSEEN]).some(TESTED_UNSEEN, rng),
    )  # fmt: skip
