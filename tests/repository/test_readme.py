"""The README's examples run, its picture is the mask's, and it stays short."""

import contextlib
import io

import flax.linen as nn
import jax
import numpy as np

from tests.support import pages

README = pages.read("README.md")


def test_readme_examples_run() -> None:
    replaced, masked = pages.blocks("python", README)
    assert all(sum(map(bool, code.splitlines())) <= 10 for code in (replaced, masked))
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(replaced, scope)
        y = nn.MultiHeadDotProductAttention(8).apply(scope["variables"], scope["x"])
        np.testing.assert_allclose(scope["y"], y, atol=1e-5)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(masked, scope)
    assert scope["y"].shape == (2, 10, 64)
    assert pages.blocks("text", README) == [printed.getvalue()]


def test_it_is_short() -> None:
    assert README.count("\n") <= 150
