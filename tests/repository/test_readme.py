"""The README's examples run, its picture is the mask's, and it stays short."""

import contextlib
import io
import re
import tomllib

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


def test_no_link_or_picture_is_dead_on_the_page_of_a_package() -> None:
    settings = tomllib.loads(pages.read("pyproject.toml"))["tool"]["hatch"]["metadata"]["hooks"]
    (link,) = settings["fancy-pypi-readme"]["substitutions"]
    text = re.sub(link["pattern"], link["replacement"], README)
    assert "](" not in text.replace("](https:", "")
    assert "![" not in text
    assert "\nThe attention of eight heads in two layers on four digits (`docs/_static/" in text
