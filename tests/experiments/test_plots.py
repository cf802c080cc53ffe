"""Pictures of alignments: names of axes, ranges, and glyphs that the font has."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.common import plots
from experiments.reports import translation
from experiments.tasks import dates


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Record the saved figures, and raise for missing glyphs."""
    found: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, *args: Any, **options: Any) -> None:
        found.append(figure)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return found


def test_alignments_are_drawn_in_any_script(drawn: list[Figure], tmp_path: Path) -> None:
    """Axes have names, the true answer is shown, and no glyph is missing."""
    sources = ["3 mars", "३ मार्च", "2012年3月", "٣ مارس"]
    found, true = ["2012", "2०12", "2012", ""], ["2012"] * 4
    plots.alignment(tmp_path / "a.png", sources, found, true, np.ones((4, 4, 8)) / 8, "weight")
    assert all(plots.drawable(source) for source, _ in translation.drawn(dates.load().test))
    panels = drawn[0].axes[:4]
    titles = [axes.get_title() for axes in panels]
    assert titles[0] == "read as 2012: right"
    assert titles[1] == "read as 2<U+0966>12: wrong, true is 2012"
    assert titles[3] == "read as nothing: wrong, true is 2012"
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)
    (bar,) = drawn[0].axes[4:]
    assert bar.get_ylabel() == "weight"
    assert {axes.images[0].get_clim() for axes in panels} == {bar.get_ylim()} == {(0.0, 1.0)}
