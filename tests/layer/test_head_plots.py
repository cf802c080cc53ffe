"""Pictures of attention weights, and the errors of invalid weights."""

from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import Capture, Encoder, EncoderBlock, MultiHeadAttention, plots

WEIGHTS = np.random.default_rng(0).dirichlet(np.ones(6), (1, 3, 4)).astype(np.float32)


def test_each_head_is_a_panel_of_its_weights() -> None:
    figure = plots.heads(WEIGHTS, "abcd")
    assert len(figure.axes) == 3
    for axis, weights in zip(figure.axes, WEIGHTS[0], strict=True):
        (image,) = axis.images
        np.testing.assert_array_equal(image.get_array(), weights)
        assert image.get_clim() == (0, pytest.approx(weights.max()))
        assert [tick.get_text() for tick in axis.get_yticklabels()] == list("abcd")
        assert not axis.get_xticks().size, "the keys are other tokens"
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_class_token_is_drawn_over_the_image() -> None:
    """Of an image of 4×6 pixels and patches of 2×2, after a class token and a register."""
    weights = np.random.default_rng(1).dirichlet(np.ones(8), (1, 2, 8)).astype(np.float32)
    figure = plots.class_token(weights, np.eye(4, 6))
    for axis, head in zip(figure.axes, weights[0], strict=True):
        _, over = axis.images
        np.testing.assert_array_equal(over.get_array(), head[0, 2:].reshape(2, 3))
    with pytest.raises(ValueError, match="a class token and a grid of patches, got 2 keys"):
        plots.class_token(np.ones((1, 2, 2)), np.ones((20, 30)))


@pytest.mark.sampled(0.08)
def test_the_intermediates_of_a_model_are_drawn_layer_by_layer() -> None:
    layer = MultiHeadAttention(2, capture=Capture(("weights", "entropy")))
    model = Encoder(2, EncoderBlock(layer, mlp_dim=8))
    x = np.random.default_rng(0).normal(size=(1, 5, 8)).astype(np.float32)
    _, sown = jax.jit(model.init_with_output)(jax.random.key(1), x)
    figure = plots.heads(sown, ["tokens"] * 5)
    titles = [axis.get_title() for axis in figure.axes]
    names = [f"layers_{i}/attention, head {head}" for i in range(2) for head in range(2)]
    assert [title.partition(", up to")[0] for title in titles] == names
    last = sown["intermediates"]["layers_1"]["attention"]["attention_weights"][0]
    np.testing.assert_array_equal(figure.axes[3].images[0].get_array(), last[0, 1])


def test_many_heads_take_several_rows() -> None:
    figure = plots.heads(np.full((11, 50, 50), 0.02), ["$x^$"] * 50)
    # Dollar signs and carets stay text.
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert [axis.get_title() for axis in figure.axes if axis.axison][-1] == "head 10, up to 0.02"
    assert not figure.axes[0].get_xticks().size, "50 names would not fit"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((np.ones((2, 3, 4, 6)),), r"one example, got \(2, 3, 4, 6\); choose an example"),
        ((np.ones((4, 6)),), r"must be \[heads, queries, keys\] of one example, got \(4, 6\)"),
        (({},), r'an array "attention_weights", got none; give the layer capture=Capture'),
    ],
)
def test_weights_that_are_no_heads_of_one_example_are_refused(args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plots.heads(*args)
