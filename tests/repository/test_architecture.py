"""The package's structure: imports point one way, and importing is cheap."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "architecture.md"

# Each folder or module may import the ones before it, and none after it.
ROOMS = (
    "base", "sharding", "scores", "masks", "positions", "kernels", "cache", "signatures", "taps",
    "layer", "edits", "plots", "linen", "variants", "nnx", "sampling", "models", "interop",
    "analysis", "optimizers",
)  # fmt: skip
HEIGHT = {name: height for height, name in enumerate((*ROOMS, ""))}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "flax_mha").with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".")


FILES = sorted((ROOT / "flax_mha").rglob("*.py"))
MODULES = {name_of(path) for path in FILES}


def imported(path: Path) -> set[str]:
    """Return the modules of this package that a file imports, at any place in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name if _module(name) in MODULES else node.module for name in inner}
    return {_module(name) for name in modules if name.split(".")[0] == "flax_mha"}


def _module(name: str) -> str:
    return name.removeprefix("flax_mha").removeprefix(".")


def room(name: str) -> str:
    return name.split(".")[0]


def test_rooms_list_every_folder_and_module() -> None:
    assert {room(name) for name in MODULES} == {*ROOMS, ""}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_rooms_import_one_way(path: Path) -> None:
    above = HEIGHT[room(name_of(path))]
    upward = {other for other in imported(path) if HEIGHT[room(other)] > above}
    assert not upward, f"{path} imports {upward}, which are above it"


@pytest.mark.parametrize("name", ROOMS)
def test_imports_within_a_room_have_no_circle(name: str) -> None:
    arrows = {
        name_of(path): {other for other in imported(path) - {name} if room(other) == name}
        for path in FILES
        if room(name_of(path)) == name
    }
    graphlib.TopologicalSorter(arrows).prepare()


def test_the_page_has_the_rooms_in_order() -> None:
    assert f"after it: {', '.join(ROOMS)}. Only" in " ".join(PAGE.read_text().split())


def test_pages_name_files_that_exist() -> None:
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"```diff.*?```", "", page.read_text(), flags=re.DOTALL)
        for name in re.findall(r"[\w.]+/[\w/]+\.py\b", text):
            tops = ROOT, ROOT / "flax_mha", page.parent
            assert any((top / name).exists() for top in tops), f"{page.name} names {name}"


# The folders of kernels, each of which may import the ones on the lines before it.
KERNEL_FOLDERS = (
    ("call",), ("chips",), ("xla",), ("cudnn", "flex", "splash"),
    ("choose", "observe"), ("using",), ("mesh",), ("",),
)  # fmt: skip
KERNEL_HEIGHT = {name: n for n, names in enumerate(KERNEL_FOLDERS) for name in names}


def folder(name: str) -> str:
    return name.partition("kernels")[2].strip(".").split(".")[0]


@pytest.mark.parametrize("path", [x for x in FILES if room(name_of(x)) == "kernels"], ids=name_of)
def test_folders_of_kernels_import_one_way(path: Path) -> None:
    here = folder(name_of(path))
    others = {folder(name) for name in imported(path) if room(name) == "kernels"} - {here}
    upward = {other for other in others if KERNEL_HEIGHT[other] >= KERNEL_HEIGHT[here]}
    assert not upward, f"{path} imports {upward}, which are not below it"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_kernels_do_not_import_sharding(path: Path) -> None:
    name = name_of(path)
    if name.startswith("kernels.") and not name.startswith("kernels.mesh"):
        assert "sharding" not in imported(path) or name in ("kernels.call.spec", "kernels.observe")
        assert name == "kernels.call.spec" or "abstract_mesh" not in path.read_text()


def test_class_names_are_unique() -> None:
    """The nnx layers share the names of the linen ones."""
    names = [
        node.name
        for path in FILES
        if name_of(path) != "nnx"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_package_does_not_name_experiments_or_assert(path: Path) -> None:
    # The wheel has no experiments.
    assert "experiments." not in path.read_text()
    for node in ast.walk(ast.parse(path.read_text())):
        # Python -O removes assertions, so errors of users must be raised.
        assert not isinstance(node, ast.Assert)


def test_import_loads_only_core_dependencies() -> None:
    """The layer needs only jax, flax and chex."""
    code = (
        "import sys, flax.linen, chex; before = set(sys.modules); import flax_mha;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    assert set(loaded) <= {"flax_mha", "jax", "jaxlib", "flax", "chex"}


def test_the_layer_loads_no_kernel_and_no_mesh() -> None:
    """The first call loads them."""
    code = "import sys, flax_mha; flax_mha.MultiHeadAttention(2); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    ours = {name for name in loaded if name.split(".")[0] == "flax_mha"}
    kernels = ("cudnn", "flex", "mesh", "splash", "xla.blockwise", "xla.checkpointed", "xla.decode")
    assert not ours & {f"flax_mha.kernels.{name}" for name in kernels}
