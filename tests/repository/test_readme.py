"""The README's examples run, and its tree names every file."""

import re

import jax
import numpy as np

from tests.support import pages

ROOT = pages.ROOT
README = pages.read("README.md")


def test_readme_examples_run() -> None:
    first, on_a_mesh = pages.blocks("python", README)
    assert sum(1 for line in first.splitlines() if line.strip()) <= 10
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(first, scope)
        plain = scope["y"]
        exec(on_a_mesh, scope)
    assert plain.shape == (2, 10, 64)
    np.testing.assert_allclose(jax.device_get(scope["y"]), plain, atol=1e-5)


def test_readme_tree_names_every_file() -> None:
    (tree,) = [block for block in pages.blocks("", README) if "flax_mha/" in block]
    for folder in ("flax_mha", "experiments", "configs"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "__init__.py":
                assert re.search(rf"^ +{re.escape(path.name)} ", tree, re.MULTILINE), path
