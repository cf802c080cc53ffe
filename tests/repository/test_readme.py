"""The README's examples run, its picture is the mask's, and it stays short."""

import contextlib
import io
import os
import re
import subprocess
import sys
import tomllib

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests.support import pages

README = pages.read("README.md")


PROGRAM, REPLACED = pages.blocks("python", README)
PRINTED, PICTURE = pages.blocks("text", README)


def test_readme_examples_run() -> None:
    assert sum(map(bool, REPLACED.splitlines())) <= 10
    scope: dict = {}
    with (
        jax.numpy_dtype_promotion("standard"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        exec(REPLACED, scope)
        flax_layer = nn.MultiHeadDotProductAttention(8)
        table = scope["mask"].dense(5)
        y = flax_layer.apply(scope["variables"], scope["x"], mask=table)
    np.testing.assert_allclose(scope["y"], y, atol=1e-5)
    assert printed.getvalue() == PICTURE


@pytest.mark.slow
def test_program_trains_and_shards_heads() -> None:
    assert 30 <= sum(map(bool, PROGRAM.splitlines())) <= 40
    # As users run it: a process without the devices and the compiler's flags of these tests.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=pages.ROOT, env=environment, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    *kernels, right = done.stdout.splitlines()
    *expected, said = PRINTED.splitlines()
    assert kernels == expected
    shares = [int(re.match(r"right: (\d+)% of 450 images", line)[1]) for line in (right, said)]
    assert abs(shares[0] - shares[1]) <= 3


def test_no_link_or_picture_is_dead_on_the_page_of_a_package() -> None:
    settings = tomllib.loads(pages.read("pyproject.toml"))["tool"]["hatch"]["metadata"]["hooks"]
    (link,) = settings["fancy-pypi-readme"]["substitutions"]
    text = re.sub(link["pattern"], link["replacement"], README)
    assert "](" not in text.replace("](https:", "")
    assert "![" not in text
    assert "\nThe attention of eight heads in two layers on four digits (`docs/_static/" in text
