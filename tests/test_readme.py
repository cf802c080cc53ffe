"""The README's example runs, its commands are those of CI, and its tree is the tree."""

import re
from pathlib import Path

import jax

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == language]


def test_the_example_runs() -> None:
    (code,) = blocks("python")
    assert sum(1 for line in code.splitlines() if line.strip()) <= 10
    with jax.numpy_dtype_promotion("standard"):
        scope: dict = {}
        exec(code, scope)
    assert scope["y"].shape == (2, 10, 64)


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
