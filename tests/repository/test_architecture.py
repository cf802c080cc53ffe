"""The package's structure: imports point one way, importing is cheap, and nothing is hidden."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "flax_mha"
# Each folder or module may import the ones before it, and none after it.
ROOMS = (
    "base", "sharding", "scores", "masks", "positions", "kernels", "cache", "signatures", "taps",
    "layer", "edits", "plots", "linen", "variants", "nnx", "sampling", "models", "interop",
    "analysis", "optimizers",
)  # fmt: skip
# The folders of kernels, each of which may import the ones on the lines before it.
KERNEL_FOLDERS = (
    ("call",), ("chips",), ("xla",), ("cudnn", "flex", "splash"),
    ("choose", "observe"), ("using",), ("mesh",), ("",),
)  # fmt: skip
HEIGHT = {name: height for height, name in enumerate((*ROOMS, ""))}
KERNEL_HEIGHT = {name: n for n, names in enumerate(KERNEL_FOLDERS) for name in names}


def name_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removeprefix("flax_mha").removesuffix("__init__").strip(".")


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imported(tree: ast.AST) -> set[str]:
    """Return the modules of this package that a file imports, at any place in it."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name if inside(name) in TREES else node.module for name in inner}
    return {inside(name) for name in modules if name.split(".")[0] == "flax_mha"}


def inside(name: str) -> str:
    return name.removeprefix("flax_mha").removeprefix(".")


IMPORTS = {name: imported(tree) for name, tree in TREES.items()}


def room(name: str) -> str:
    return name.split(".")[0]


def folder(name: str) -> str:
    """Return the folder of a module of kernels."""
    return name.removeprefix("kernels").strip(".").split(".")[0]


def test_rooms_import_one_way() -> None:
    assert {room(name) for name in TREES} == {*ROOMS, ""}
    for name, others in IMPORTS.items():
        upward = {other for other in others if HEIGHT[room(other)] > HEIGHT[room(name)]}
        assert not upward, f"{name} imports {upward}, which are above it"


@pytest.mark.parametrize("name", ROOMS)
def test_imports_within_a_room_have_no_circle(name: str) -> None:
    arrows = {
        module: {other for other in others - {name} if room(other) == name}
        for module, others in IMPORTS.items()
        if room(module) == name
    }
    graphlib.TopologicalSorter(arrows).prepare()


def test_folders_of_kernels_import_one_way_and_no_mesh() -> None:
    for name in (name for name in TREES if room(name) == "kernels"):
        here, others = folder(name), {x for x in IMPORTS[name] if room(x) == "kernels"}
        for other in {folder(x) for x in others} - {here}:
            assert KERNEL_HEIGHT[other] < KERNEL_HEIGHT[here], f"{name} imports {other}"
        if here != "mesh" and name not in ("kernels.call.spec", "kernels.observe"):
            assert "sharding" not in IMPORTS[name], name
            assert "abstract_mesh" not in ast.unparse(TREES[name]), name


def test_import_loads_only_core_dependencies_and_a_layer_no_kernel() -> None:
    """The layer needs only jax, flax and chex; the first call loads kernels and meshes."""
    code = (
        "import sys, flax.linen, chex; before = set(sys.modules); import flax_mha;"
        "flax_mha.MultiHeadAttention(2); print(*set(sys.modules) - before)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    assert {name.split(".")[0] for name in loaded} <= {"flax_mha", "jax", "jaxlib", "flax", "chex"}
    kernels = ("cudnn", "flex", "mesh", "splash", "xla.blockwise", "xla.checkpointed", "xla.decode")
    assert not {f"flax_mha.kernels.{name}" for name in kernels} & {*loaded}


# Code that hides how a file works or fails in an installed package.
TRICKS = {
    "a name that Python keeps": r"__code__|__closure__|__wrapped__|getdoc|getclosurevars|overload",
    "a replaced __class__": r"\.__class__ =|'__class__'",
    "__getattribute__": r"def __getattribute__",
    # `dis` reads bytecode, and the wheel has no experiments.
    "an import": r"\b(import|from) (dis|experiments)\b",
    "assert": r"(?m)^ *assert ",  # `python -O` removes it, so errors of users must be raised.
    "type(name, bases, namespace)": r"\btype\([^()]+, ",
    "object.__setattr__ of another object": r"object\.__setattr__\((?!self,)",
}


def tricks(tree: ast.AST) -> set[str]:
    code = ast.unparse(tree)
    return {name for name, pattern in TRICKS.items() if re.search(pattern, code)}


@pytest.mark.parametrize(
    ("code", "trick"),
    [
        ("layer.__class__ = Other", "a replaced __class__"),
        ("class A:\n def __getattribute__(self, name): pass", "__getattribute__"),
        ("from dis import get_instructions", "an import"),
        ("import experiments.train", "an import"),
        ("object.__setattr__(layer, name, x)", "object.__setattr__ of another object"),
        ("@overload\ndef f(x): ...", "a name that Python keeps"),
        ("assert x", "assert"),
    ],
)
def test_each_trick_is_seen(code: str, trick: str) -> None:
    assert trick in tricks(ast.parse(code))


def test_package_uses_no_tricks() -> None:
    """Only swapped models have a class made by calling `type`."""
    used = {name: names for name, tree in TREES.items() if (names := tricks(tree))}
    assert used == {"interop.contexts": {"type(name, bases, namespace)"}}
