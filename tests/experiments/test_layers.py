"""The trainer is read in one sitting, and imports nothing that only maintainers run."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "experiments").rglob("*.py"))
# Each folder, or file at the top, may import those before it, and none after. Only maintainers run
# the last three.
LAYERS = (
    "", "__main__", "common", "runs", "tasks", "trainer", "trained", "reports", "convert",
    "generate", "look", "train", "plan", "measure", "studies",
)  # fmt: skip
# All that one opens to follow `experiments.train`: the command, the loop and what it calls.
READ = ("train.py", "trainer/", "tasks/__init__.py", "tasks/task.py", "runs/log.py")
LINES, WITH_A_TASK, RUNS = 900, 1020, 700


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "experiments").with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".")


MODULES = {name_of(path) for path in FILES}


def imported(path: Path) -> set[str]:
    """Return the modules of experiments that a file imports, at any place in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments"):
            inner = node.module.removeprefix("experiments").removeprefix(".")
            for alias in node.names:
                full = f"{inner}.{alias.name}".removeprefix(".")
                names.add(full if full in MODULES else inner)
    return names


def layer(name: str) -> str:
    return name if name in LAYERS else name.split(".")[0]


def test_the_layers_are_all_there_is() -> None:
    assert {layer(name) for name in MODULES} == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_layers_import_one_way(path: Path) -> None:
    mine = layer(name_of(path))
    if mine == "":  # It installs the hooks of a command before all else.
        return
    later = set(LAYERS[LAYERS.index(mine) + 1 :])
    upward = {name for name in imported(path) if layer(name) in later}
    assert not upward, f"{path} imports {upward}, which stand above it"


def test_the_trainer_is_read_in_one_sitting() -> None:
    found = {str(path.relative_to(ROOT / "experiments")): lines(path) for path in FILES}
    read = {name: count for name, count in found.items() if name.startswith(READ)}
    assert sum(read.values()) <= LINES, read
    assert sum(read.values()) + found["tasks/digits.py"] <= WITH_A_TASK
    assert sum(count for name, count in found.items() if name.startswith("runs/")) <= RUNS
