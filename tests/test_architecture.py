"""What the tree promises: arrows point one way, and importing is cheap."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"

# Each layer may import those before it, and none after.
LAYERS = [
    {"arguments", "inputs", "muon", "private", "symbols"},
    {"clipping"},
    {"shapes", "qk_norm"},
    {"fields", "rope_scaling", "turning"},
    {"grid", "mesh_axes", "axial"},
    {"sharding"},
    {"masks.tables", "masks.tiles", "padding", "scores.base"},
    {"masks.base", "scores.rules", "scores.relative"},
    {"masks.rules", "masks.lattice", "scores"},
    {"masks.tokens", "masks.chosen"},
    {"masks", "positions", "tensor_parallel"},
    {"linear"},
    {"kernels.normalizers", "kernels.limits"},
    {
        "kernels.derivatives",
        "kernels.dropout",
        "kernels.finite",
        "kernels.leaves",
        "kernels.stored",
        "kernels.tpu",
        "kernels.platform",
        "kernels.traced",
    },
    {"kernels.cudnn.fused", "kernels.cudnn.ragged", "kernels.flex.lowered"},
    {"kernels.spec"},
    {"kernels.plan", "kernels.ids", "kernels.softmax"},
    {"kernels.tiling"},
    {"kernels.splash.lazy", "kernels.cudnn.band", "kernels.flex.walk"},
    {"kernels.flex.tile", "kernels.cudnn.settled"},
    {"kernels.flex.core"},
    {"kernels.reference", "kernels.blockwise", "kernels.splash", "kernels.cudnn", "kernels.flex"},
    {"kernels.observe", "kernels.decode", "kernels.checkpointed"},
    {"kernels.registry", "kernels.parallel.ring", "kernels.parallel.devices"},
    {"kernels.parallel.shards"},
    {"kernels.choice", "kernels.options"},
    {"kernels"},
    {"kernels.parallel"},
    {"cache.slots", "cache.look"},
    {"cache.kv"},
    {"cache.variables", "cache.config"},
    {"cache"},
    {"flax_functions", "heads", "shared"},
    {"call"},
    {"core", "variants.common"},
    {"attention", "nnx", "mlp", "embeddings", "routed"},
    {
        "variants.latent",
        "variants.differential",
        "variants.forgetting",
        "variants.talking",
        "variants.chosen",
    },
    {"variants", "experts"},
    {"residual"},
    {"blocks"},
    {"stacks"},
    {"models", "sampling"},
    {"search"},
    {"generation"},
    {"interop.axes", "interop.settings"},
    {"interop.config", "interop.files", "interop.neutral", "interop.placing"},
    {"interop.generating", "interop.table"},
    {"interop.classes"},
    {
        "interop.bert",
        "interop.dino",
        "interop.gpt2",
        "interop.gpt_neox",
        "interop.llama",
        "interop.t5",
        "interop.vit",
        "interop.vit_pytorch",
        "interop.whisper",
    },
    {"interop.moe", "interop.swapping", "interop.torch_layers", "interop.towers"},
    {"interop.libraries"},
    {"interop.timm"},
    {"interop"},
    {""},
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}


def picture() -> str:
    """The layers as docs/architecture.md shows them."""
    rows = (", ".join(f"`{name or 'flax_mha'}`" for name in sorted(layer)) for layer in LAYERS)
    return "\n".join(f"{number}. {row}" for number, row in enumerate(rows, 1))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "flax_mha").with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".")


def imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, at any place in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if _module(name) in HEIGHT else node.module for name in inner}
    return {_module(name) for name in found if name.split(".")[0] == "flax_mha"}


def _module(name: str) -> str:
    return name.removeprefix("flax_mha").removeprefix(".")


FILES = sorted((ROOT / "flax_mha").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    name = name_of(path)
    assert name in HEIGHT, f"{name} is missing in LAYERS"
    upward = {other for other in imported(path) if HEIGHT[other] >= HEIGHT[name]}
    assert not upward, f"{name} imports {upward}, which stand above it"


def test_the_page_shows_the_layers() -> None:
    """`python -m tests.test_architecture` writes them anew."""
    assert f"-->\n\n{picture()}\n\n<!-- end -->" in PAGE.read_text()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_kernels_see_no_mesh(path: Path) -> None:
    name = name_of(path)
    if name.startswith("kernels.") and not name.startswith("kernels.parallel"):
        assert "sharding" not in imported(path) or name in ("kernels.spec", "kernels.observe")
        assert name == "kernels.spec" or "abstract_mesh" not in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_library_knows_nothing_of_the_experiments(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "experiments" not in ast.unparse(node)
        # Assertions vanish under -O: users' errors are raised.
        assert not isinstance(node, ast.Assert)


def test_files_and_functions_stay_small() -> None:
    others = (path for name in ("experiments", "tests") for path in (ROOT / name).rglob("*.py"))
    for path in [*FILES, *sorted(others)]:
        text = path.read_text()
        assert text.count("\n") <= 300 or "# Over 300 lines:" in text, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                doc = ast.get_docstring(node, clean=False) or ""
                lines = node.end_lineno - node.lineno + 1 - doc.count("\n")
                reason = "# Over 60 lines:" in (ast.get_source_segment(text, node) or "")
                assert lines <= 60 or reason, f"{path}: {node.name} has {lines} lines"


def test_importing_needs_only_the_core_dependencies() -> None:
    """Beside jax, flax and chex, a user of the layer installs and loads nothing."""
    code = (
        "import sys, flax.linen, chex; before = set(sys.modules); import flax_mha;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    assert set(loaded) <= {"flax_mha", "jax", "jaxlib", "flax", "chex"}


if __name__ == "__main__":
    before, after = re.split(r"(?<=py -->\n).*(?=<!-- end)", PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(f"{before}\n{picture()}\n\n{after}")
