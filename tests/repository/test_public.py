"""All public names exist after `import flax_mha`, load on first use, and are documented."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flax_mha
from tests.support.pages import ROOT, read

NAMES = sorted({*flax_mha.__all__, "nnx"})
MODULES = [name for name in NAMES if isinstance(getattr(flax_mha, name), type(flax_mha))]
# In a fresh process: this one has all modules loaded.
FRESH = """
import sys
import flax_mha

assert not [name for name in sys.modules if name.startswith(("flax_mha.", "jax", "flax."))]
assert set(flax_mha.__all__) <= set(dir(flax_mha))

# The function, whatever is imported and in which order.
from flax_mha.models.generation import Generated
import flax_mha.sampling
assert flax_mha.generate.__name__ == "generate" and callable(flax_mha.generate)
assert flax_mha.Generated is Generated

from flax import nnx
from flax_mha import *
assert nnx.__name__ == "flax.nnx" and flax_mha.nnx.__name__ == "flax_mha.nnx"
for name in flax_mha.__all__:
    assert globals()[name] is getattr(flax_mha, name), name

try:
    flax_mha.MultiheadAttention
except AttributeError as error:
    assert "module 'flax_mha' has no attribute 'MultiheadAttention'" in str(error)
    assert (error.name, error.obj) == ("MultiheadAttention", flax_mha)  # For suggestions.
else:
    raise AssertionError
"""


def test_public_names_exist_after_import_and_load_on_first_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(read("flax_mha/__init__.py"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        seen |= {alias.name: node.module for alias in node.names}
    assert sorted(seen) == NAMES
    homes = {name: f"flax_mha.{home}" for name, home in flax_mha._HOME.items()}
    assert {name: home for name, home in seen.items() if home != "flax_mha"} == homes


@pytest.mark.parametrize("name", MODULES)
def test_public_modules_list_the_names_that_they_define(name: str) -> None:
    """Completion shows the names that a module defines or re-exports, and no others."""
    module = importlib.import_module(f"flax_mha.{name}")
    names = set()
    for node in ast.parse(Path(str(module.__file__)).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            listed = {alias.name for alias in node.names} & {*module.__all__}
            names |= listed | {x.name for x in node.names if x.asname == x.name}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = (part for target in targets for part in ast.walk(target))
            names |= {x.id for x in parts if isinstance(x, ast.Name) and x.id.isupper()}
    assert sorted(module.__all__) == sorted(x for x in names if x[0] != "_")
    assert dir(module) == sorted(module.__all__)


def test_reference_has_every_public_name() -> None:
    """Except types of annotations, and modules whose members autodoc lists by itself."""
    text = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.rst"))
    listed = re.findall(r"^\.\. automodule:: flax_mha\.(\S+)$(?!\n   :no-members:)", text, re.M)
    documented = {name.split(".")[-1] for name in re.findall(r"^\.\. \w+:: (\S+)$", text, re.M)}
    public = {*flax_mha.__all__}
    for name in {*MODULES} - {*listed}:
        public |= {x for x in getattr(flax_mha, name).__all__ if not x.isupper()}
    for name in listed:
        documented |= {*importlib.import_module(f"flax_mha.{name}").__all__}
    assert public - documented == {"LogicalNames", "Projection", "Rotation"}


def test_version_is_stated_alike() -> None:
    for page in ("CITATION.cff", "CHANGELOG.md"):
        found = re.search(r"^(?:version: |## \[)([\d.]+)", read(page), re.M)
        assert found
        assert found[1] == flax_mha.__version__
