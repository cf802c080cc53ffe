"""Pictures of heads."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot

from flax_mha.layer import plots

mpl.use("agg")


def test_each_head_has_a_picture() -> None:
    weights = np.random.default_rng(0).uniform(size=(3, 5, 5))
    figure = plots.heads({"layer 0": weights, "layer 1": weights[:2]}, list("abcde"), columns=3)
    drawn = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_title() for axis in drawn] == [
        "layer 0 head 0", "layer 0 head 1", "layer 0 head 2", "layer 1 head 0", "layer 1 head 1",
    ]  # fmt: skip
    np.testing.assert_array_equal(drawn[1].images[0].get_array(), weights[1])
    for axis in (drawn[0].xaxis, drawn[0].yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == list("abcde")
    pyplot.close(figure)


def test_arrays_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"weights must have shape \[N, T, S\].*weights\[0\]"):
        plots.heads(np.ones((1, 2, 3, 3)))
    with pytest.raises(ValueError, match="with S = 2 tokens, got"):
        plots.heads(np.ones((2, 3, 3)), ["a", "b"])
