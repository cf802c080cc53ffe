"""As SECURITY.md says, folders of runs and models are data: nothing in them is executed."""

import ast
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from flax_mha import interop
from tests.interop.test_files import CONFIG, variables

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted(path for top in ("flax_mha", "experiments") for path in (ROOT / top).rglob("*.py"))
UNPICKLE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
RUN = {"eval", "exec", "compile", "__import__", "execfile"}
# The files that may, each with its reason.
ALLOWED = {
    ("flax_mha/kernels/call/spec.py", "import_module"),  # names of kernels, from a table
    ("flax_mha/__init__.py", "import_module"),  # names of `__all__`
    ("experiments/runs/log.py", "import_module"),  # two names in that file
    ("experiments/measure/conventions/libraries.py", "import_module"),  # names in that file
}


def dangers(code: str) -> set[str]:
    """Return the names in the code that could execute data."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = {alias.name.partition(".")[0] for alias in node.names} | {module.split(".")[0]}
            found |= names & (UNPICKLE | {"runpy", "subprocess", "pty", "code"})
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & (RUN | {"import_module"})
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & {"system", "popen", "import_module", "spec_from_file_location"}
        elif isinstance(node, ast.keyword) and getattr(node.value, "value", None) is True:
            found |= {node.arg or ""} & {"allow_pickle", "shell", "trust_remote_code"}
    return found


def test_no_source_unpickles_or_evaluates() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), danger)
        for path in SOURCES
        for danger in dangers(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "code",
    ["import pickle", "eval(x)", "np.load(p, allow_pickle=True)", "os.system(x)", "f(shell=True)",
     "from importlib import import_module\nimport_module(x)"],
)  # fmt: skip
def test_each_danger_is_detected(code: str) -> None:
    assert dangers(code)


class Touch:
    """A class with pickles that execute code when read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_model_folder_is_never_executed(tmp_path: Path) -> None:
    mark, folder = tmp_path / "mark", tmp_path / "model"
    interop.save(CONFIG, variables(), folder)
    (folder / "modeling_evil.py").write_text(f"open({str(mark)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    dtype = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    config |= {"auto_map": {"AutoModel": "modeling_evil.Model"}, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    # The custom code may compute something else than the tables.
    with pytest.raises(ValueError, match="auto_map"):
        interop.load(folder)
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    interop.load(folder)
    assert "modeling_evil" not in sys.modules
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.safetensors"):
        (folder / name).write_bytes(pickle.dumps(Touch(mark)))
        with pytest.raises((FileNotFoundError, ValueError)):
            interop.load(folder)
    assert not mark.exists()
    pickle.loads((folder / "model.safetensors").read_bytes())
    assert mark.exists()  # Unpickling executes it.
