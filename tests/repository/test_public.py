"""All public names exist after `import flax_mha`, and each loads on first use."""

import ast
import subprocess
import sys
from pathlib import Path

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
import flax_mha.models.sampling
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
