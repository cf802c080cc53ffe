"""Pictures explain themselves: names of axes, ranges, and glyphs that the font has."""

import warnings
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import plots
from experiments.plan import report
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


def test_losses_of_two_kinds_have_two_axes(drawn: list[Figure], tmp_path: Path) -> None:
    plots.curves(tmp_path / "a.png", ROWS, "training, moved", "of smoothed labels")
    plots.curves(tmp_path / "b.png", ROWS, "training", "")
    accuracy, test, train = drawn[0].axes
    assert lines(accuracy) == ["training, moved", "test"]
    assert (lines(test), test.get_ylabel()) == (["test"], "loss")
    assert (lines(train), train.get_ylabel()) == (["training, moved"], "of smoothed labels")
    assert [lines(axes) for axes in drawn[1].axes] == [["training", "test"]] * 2


def test_axes_of_a_short_run_are_wide_enough(drawn: list[Figure], tmp_path: Path) -> None:
    plots.curves(tmp_path / "a.png", ROWS, "training", "")
    accuracy, loss = drawn[0].axes
    assert accuracy.get_ylim() == (-0.02, 1.02)
    assert loss.get_xlim()[0] == 0
    low, high = loss.get_ylim()
    assert high / low >= 3.99
    assert all(line.get_marker() == "o" for line in loss.lines)


def test_attention_picture_explains_its_colors(drawn: list[Figure], tmp_path: Path) -> None:
    weights = np.random.default_rng(0).random((1, 2, 3, 16, 16))
    plots.attention(tmp_path / "a.png", np.ones((1, 8, 8)), weights, ["7 read as 1"])
    label = drawn[0].axes[-1].get_ylabel()
    assert label == "weight of a patch, mean over all queries (1: an even spread)"


def test_uniform_attention_is_flat_over_distance(drawn: list[Figure], tmp_path: Path) -> None:
    plots.by_distance(tmp_path / "a.png", np.full((1, 2, 8, 8), 1 / 8))
    (axes,) = drawn[0].axes
    for line in axes.lines[:2]:
        np.testing.assert_allclose(line.get_ydata(), 1 / 8)
    assert "from the query to the key" in axes.get_xlabel()


def test_alignments_are_drawn_in_any_script(drawn: list[Figure], tmp_path: Path) -> None:
    """Axes have names, the true answer is shown, and no glyph is missing."""
    sources = ["3 mars", "३ मार्च", "2012年3月", "٣ مارس"]
    found, true = ["2012", "2०12", "2012", ""], ["2012"] * 4
    plots.alignment(tmp_path / "a.png", sources, found, true, np.ones((4, 4, 8)) / 8, "weight")
    panels = drawn[0].axes[:4]
    titles = [axes.get_title() for axes in panels]
    assert titles[0] == "read as 2012: right"
    assert titles[1] == "read as 2<U+0966>12: wrong, true is 2012"
    assert titles[3] == "read as nothing: wrong, true is 2012"
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)
    (bar,) = drawn[0].axes[4:]
    assert bar.get_ylabel() == "weight"
    assert {axes.images[0].get_clim() for axes in panels} == {bar.get_ylim()} == {(0.0, 1.0)}


def test_mathematics_of_strangers_is_text(drawn: list[Figure], tmp_path: Path) -> None:
    odd = ["$$", "$x^$", r"$\foo$", "$a$"]
    plots.alignment(tmp_path / "a.png", odd, odd[::-1], odd, np.ones((4, 8, 8)) / 8, "weight")
    plots.attention(tmp_path / "a.png", np.ones((1, 8, 8)), np.ones((1, 1, 1, 4, 4)), ["$x^$"])


def test_drawn_dates_have_glyphs_in_the_font() -> None:
    pairs = translation.drawn(dates.load().test)
    assert len(pairs) == translation.DRAWN
    assert all(plots.drawable(source) for source, _ in pairs)


def test_plan_names_its_compiler() -> None:
    assert report.compiler(jax.devices()[0]) == f"jaxlib {jaxlib.__version__}"
