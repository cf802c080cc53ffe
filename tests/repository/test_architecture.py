"""The package's structure: imports point one way, and importing is cheap."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.nnx import Variable
from jax.extend.core import ClosedJaxpr

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "architecture.md"
COMMAND = "tests.repository.test_architecture"

# Each folder or module may import the ones before it, and none after it.
ROOMS = (
    "base", "sharding", "scores", "masks", "positions", "kernels", "cache", "signatures", "taps",
    "layer", "edits", "plots", "linen", "variants", "nnx", "sampling", "models", "interop",
    "analysis", "optimizers",
)  # fmt: skip
# Attributes of arrays, dtypes, jaxprs and variables of nnx.
FOREIGN = {
    x for kind in (jax.Array, np.dtype, np.ndarray, ClosedJaxpr, Variable) for x in dir(kind)
}
HEIGHT = {name: height for height, name in enumerate((*ROOMS, ""))}


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's or a package's docstring, without its full stop."""
    file = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None
    sentence = re.split(r"(?<=\.)\s|\n\n", text or "", maxsplit=1)[0]
    return " ".join(sentence.split()).rstrip(".:")


def rooms() -> str:
    """Return the table of rooms, each with the first sentence of its docstring."""
    paths = [ROOT / "flax_mha" / name for name in ROOMS]
    paths = [path if path.is_dir() else path.with_suffix(".py") for path in paths]
    rows = (f"| `{path.stem}` | {first_sentence(path)} |" for path in paths)
    return "\n".join(["| room | holds |", "|---|---|", *rows])


def tree() -> str:
    """Return the files of the package, and the folders and programs of experiments.

    Each has the first sentence of its docstring.
    """
    lines = []
    for top in ("flax_mha", "experiments"):
        shown = (ROOT / top).rglob("*") if top == "flax_mha" else (ROOT / top).glob("*")
        for path in [ROOT / top, *sorted(shown)]:
            package = path.is_dir() and any(path.rglob("*.py"))
            if package or (path.suffix == ".py" and path.name != "__init__.py"):
                name = "  " * len(path.relative_to(ROOT).parts[1:]) + path.name + "/" * package
                lines.append(f"{name:23} {first_sentence(path)}".rstrip())
    return "\n".join(["```text", *lines, "```"])


def generated(text: str) -> str:
    """Return the page with the table of rooms and the tree of files as they are now."""
    for name, content in (("rooms", rooms()), ("files", tree())):
        start, end = f"<!-- {name}, by python -m {COMMAND} -->", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = f"{before}{start}\n\n{content}\n\n{end}{rest.split(end)[1]}"
    return text


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


@functools.cache
def attributes(path: Path) -> dict[str, set[str]]:
    """Return the names of the fields and methods of each class that a file defines."""
    named = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            methods = {x.name for x in ast.walk(node) if isinstance(x, ast.FunctionDef)}
            fields = {ast.unparse(x.target) for x in node.body if isinstance(x, ast.AnnAssign)}
            named[node.name] = methods | fields
    return named


def stand_ins(path: Path) -> Iterator[tuple[int, set[str]]]:
    """Yield the line and the attributes of each value that a file knows by attributes alone.

    It is asked by `hasattr` or `getattr`, or it is an argument of any type. Attributes of arrays
    and of jaxprs do not count.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(ast.Name("hasattr" | "getattr"), [_, ast.Constant(str(name)), *_]):
                yield node.lineno, {name} - FOREIGN
            case ast.FunctionDef(args=arguments):
                for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    reads = {
                        y.attr
                        for y in ast.walk(node)
                        if isinstance(y, ast.Attribute) and ast.unparse(y.value) == x.arg
                    } - FOREIGN
                    if x.annotation and "Any" in ast.unparse(x.annotation) and len(reads) > 2:
                        yield node.lineno, reads


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_value_stands_for_a_class_above(path: Path) -> None:
    """An import that a file avoids by duck typing points upward too."""
    height = HEIGHT[room(name_of(path))]
    for line, reads in stand_ins(path):
        classes = {
            (name, HEIGHT[room(name_of(other))])
            for other in FILES
            for name, own in attributes(other).items()
            if reads and reads <= own
        }
        assert not classes or min(at for _, at in classes) <= height, (path, line, reads, classes)


@pytest.mark.parametrize("name", ROOMS)
def test_imports_within_a_room_have_no_circle(name: str) -> None:
    arrows = {
        name_of(path): {other for other in imported(path) - {name} if room(other) == name}
        for path in FILES
        if room(name_of(path)) == name
    }
    graphlib.TopologicalSorter(arrows).prepare()


def test_the_page_has_the_rooms_and_files_of_now() -> None:
    text = PAGE.read_text()
    assert generated(text) == text, f"run python -m {COMMAND}"


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


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text()))
