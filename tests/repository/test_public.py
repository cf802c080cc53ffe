"""All public names exist after `import flax_mha`, and each loads on first use."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import flax_mha

ROOT = Path(__file__).parent.parent.parent
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
assert flax_mha.masks.Causal is masks.Causal

try:
    flax_mha.MultiheadAttention
except AttributeError as error:
    assert "module 'flax_mha' has no attribute 'MultiheadAttention'" in str(error)
    assert (error.name, error.obj) == ("MultiheadAttention", flax_mha)  # For suggestions.
else:
    raise AssertionError
print("all well")
"""


def test_public_names_exist_after_import_and_load_on_first_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout == "all well\n", done.stderr


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "flax_mha" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            # Type checkers count these as exported, and no others.
            assert alias.name in flax_mha.__all__ or alias.asname == alias.name
            seen[alias.name] = node.module
    assert sorted([*flax_mha.__all__, "nnx"]) == sorted(seen)
    homes = {name: f"flax_mha.{home}" for name, home in flax_mha._HOME.items()}
    assert {name: home for name, home in seen.items() if home != "flax_mha"} == homes


NAMES = sorted({*flax_mha.__all__, "nnx"})
MODULES = [name for name in NAMES if isinstance(getattr(flax_mha, name), type(flax_mha))]


@pytest.mark.parametrize("name", MODULES)
def test_public_modules_import_and_list_their_names(name: str) -> None:
    """Completion shows the names that a module defines or re-exports, and no others."""
    module = importlib.import_module(f"flax_mha.{name}")
    assert module is getattr(flax_mha, name)
    names = set()
    for node in ast.parse(Path(str(module.__file__)).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
            names |= {alias.name for alias in node.names} & {*module.__all__}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = (part for target in targets for part in ast.walk(target))
            names |= {x.id for x in parts if isinstance(x, ast.Name) and x.id.isupper()}
    assert sorted(module.__all__) == sorted(x for x in names if x[0] != "_")
    assert dir(module) == sorted(module.__all__)


def test_names_import_from_public_modules() -> None:
    from flax_mha.edits import Edit
    from flax_mha.plots import heads
    from flax_mha.sampling import top_k

    assert (Edit, heads, top_k) == (
        flax_mha.edits.Edit, flax_mha.plots.heads, flax_mha.sampling.top_k
    )  # fmt: skip
