"""Pictures explain themselves: names of axes, ranges, and glyphs that the font has."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.common import plots
from experiments.reports import translation
from experiments.tasks import dates

ROWS = [
    {"step": 10, "split": "train", "loss": 2.30, "accuracy": 0.1},
    {"step": 10, "split": "test", "loss": 2.29, "accuracy": 0.1},
]


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


def lines(axes: Any) -> list[str]:
    return [line.get_label() for line in axes.lines]


def test_losses_of_two_kinds_have_two_wide_axes(drawn: list[Figure], tmp_path: Path) -> None:
    plots.curves(tmp_path / "a.png", ROWS, "training, moved", "of smoothed labels")
    plots.curves(tmp_path / "b.png", ROWS, "training", "")
    accuracy, test, train = drawn[0].axes
    assert lines(accuracy) == ["training, moved", "test"]
    assert (lines(test), test.get_ylabel()) == (["test"], "loss")
    assert (lines(train), train.get_ylabel()) == (["training, moved"], "of smoothed labels")
    accuracy, loss = drawn[1].axes
    assert [lines(axes) for axes in (accuracy, loss)] == [["training", "test"]] * 2
    assert accuracy.get_ylim() == (-0.02, 1.02)
    low, high = loss.get_ylim()
    assert high / low >= 3.99  # though the run is short


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


def test_pictures_of_attention_name_their_axes(drawn: list[Figure], tmp_path: Path) -> None:
    weights = np.random.default_rng(0).random((1, 2, 3, 16, 16))
    plots.attention(tmp_path / "a.png", np.ones((1, 8, 8)), weights, ["$x^$ is no mathematics"])
    plots.by_distance(tmp_path / "b.png", np.full((1, 2, 8, 8), 1 / 8))
    label = drawn[0].axes[-1].get_ylabel()
    assert label == "weight of a patch, mean over all queries (1: an even spread)"
    (axes,) = drawn[1].axes
    assert "from the query to the key" in axes.get_xlabel()
    for line in axes.lines[:2]:
        np.testing.assert_allclose(line.get_ydata(), 1 / 8)
