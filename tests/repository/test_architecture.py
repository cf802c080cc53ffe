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
    "base", "sharding", "scores", "masks", "positions", "kernels", "cache", "layer", "linen",
    "variants", "nnx", "models", "interop",
)  # fmt: skip
HEIGHT = {name: height for height, name in enumerate((*ROOMS, ""))}


def picture() -> str:
    """Return the table of rooms for docs/architecture.md, each with the first line of its docs."""
    files = {name: ROOT / "flax_mha" / name for name in ROOMS}
    texts = [(x / "__init__.py" if x.is_dir() else x.with_suffix(".py")).read_text()
             for x in files.values()]  # fmt: skip
    heads = (ast.get_docstring(ast.parse(text)).split("\n")[0].removesuffix(".") for text in texts)
    rows = zip(ROOMS, heads, strict=True)
    return "\n".join(
        ["| room | holds |", "|---|---|", *(f"| `{x}` | {head} |" for x, head in rows)]
    )


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
    assert len(ROOMS) <= 13


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


def test_page_shows_the_table_of_rooms() -> None:
    """To regenerate the table, run `python -m tests.repository.test_architecture`."""
    assert f"-->\n\n{picture()}\n\n<!-- end -->" in PAGE.read_text()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_kernels_do_not_import_sharding(path: Path) -> None:
    name = name_of(path)
    if name.startswith("kernels.") and not name.startswith("kernels.mesh"):
        assert "sharding" not in imported(path) or name in ("kernels.spec", "kernels.observe")
        assert name == "kernels.bind" or "abstract_mesh" not in path.read_text()


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
def test_package_does_not_import_experiments_or_assert(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "experiments" not in ast.unparse(node)
        # Python -O removes assertions, so errors of users must be raised.
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


if __name__ == "__main__":
    before, after = re.split(r"(?<=py -->\n).*(?=<!-- end)", PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(f"{before}\n{picture()}\n\n{after}")
