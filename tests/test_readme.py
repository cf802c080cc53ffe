"""The README's example runs, its commands are those of CI, and its tree is the tree."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == language]


def test_the_examples_run() -> None:
    first, on_a_mesh = blocks("python")
    assert sum(1 for line in first.splitlines() if line.strip()) <= 10
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(first, scope)
        plain = scope["y"]
        exec(on_a_mesh, scope)
    assert plain.shape == (2, 10, 64)
    np.testing.assert_allclose(jax.device_get(scope["y"]), plain, atol=1e-5)


@pytest.mark.slow
def test_the_page_on_sharding_runs() -> None:
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        for code in blocks("python", (ROOT / "docs" / "sharding.md").read_text()):
            exec(code, scope)
    y = scope["y"]
    assert y.sharding.spec[0] == "data"
    expected = scope["model"].apply(jax.device_get(scope["variables"]), scope["x"])
    np.testing.assert_allclose(jax.device_get(y), expected, atol=1e-5)


@pytest.mark.slow
def test_the_page_on_decoding_runs() -> None:
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for code in blocks("python", (ROOT / "docs" / "decoding.md").read_text()):
            exec(code, scope)
    np.testing.assert_array_equal(scope["cache"].free(scope["held"]), [9, 12])
    np.testing.assert_array_equal(scope["cache"].free(scope["best_of_3"]), [9] * 3 + [12] * 3)


@pytest.mark.slow
def test_the_page_on_nnx_runs() -> None:
    scope: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        for code in blocks("python", (ROOT / "docs" / "nnx.md").read_text()):
            exec(code, scope)
    np.testing.assert_allclose(scope["same"], scope["layer"](scope["x"]), atol=1e-6)
    np.testing.assert_allclose(scope["prompt"], scope["same"], atol=1e-5)
    assert scope["following"].shape == (2, 1, 64)


def test_ci_runs_the_command_of_the_readme() -> None:
    commands = [block.strip() for block in blocks("sh")]
    (tests,) = [command for command in commands if "pytest" in command]
    install_and_test = tests.split("activate && ")[1]
    assert install_and_test in (ROOT / ".ci/run").read_text().splitlines()


def test_the_tree_names_every_file() -> None:
    (tree,) = [block for block in blocks("") if "flax_mha/" in block]
    for folder in ("flax_mha", "experiments", "configs"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "__init__.py":
                assert re.search(rf"^ +{re.escape(path.name)} ", tree, re.MULTILINE), path
