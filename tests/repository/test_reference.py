"""The site's reference has every public name, and its contents list every page."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import flax_mha
from flax_mha.interop import table
from flax_mha.layer import core
from flax_mha.optimizers import qk_clip
from tests.support.pages import ROOT, read

DOCS = ROOT / "docs"
MODULES = [
    module for name in flax_mha.__all__ if inspect.ismodule(module := getattr(flax_mha, name))
]


def directives() -> Iterator[tuple[str, str]]:
    """Yield each autodoc directive with its full name."""
    for page in sorted((DOCS / "api").glob("*.rst")):
        module = ""
        pattern = r"^\.\. (\w+):: (\S+)$((?:\n   :.*)*)"
        for kind, name, options in re.findall(pattern, page.read_text(), re.MULTILINE):
            if kind in ("module", "currentmodule"):
                module = name
            elif kind == "automodule" and ":no-members:" not in options:
                yield kind, name
                of_module = vars(importlib.import_module(name))
                for member in sorted({*of_module["__all__"]} - {*options.split()}):
                    # Constants have no text of their own.
                    if inspect.isroutine(of_module[member]) or inspect.isclass(of_module[member]):
                        yield "autoobject", f"{name}.{member}"
            elif kind == "automodule" or name.startswith("flax_mha."):
                yield kind, name
            else:
                yield kind, f"{module}.{name}"


def found(name: str) -> Any:
    """Return the object with this full name."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            thing = getattr(thing, part)
        return thing
    raise AttributeError(name)


DOCUMENTED = [found(name) for kind, name in directives()]


def exported(module: ModuleType) -> Iterator[Any]:
    """Yield functions and classes that a module defines or re-exports `as` themselves."""
    tree = ast.parse(Path(module.__file__ or "").read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names if alias.asname == alias.name]
        else:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        for name in names:
            thing = getattr(module, name)
            public = name[0] != "_" and not name.isupper()
            if public and (inspect.isroutine(thing) or inspect.isclass(thing)):
                yield thing


def test_reference_has_every_public_name() -> None:
    names = [name for name in flax_mha.__all__ if getattr(flax_mha, name) not in MODULES]
    assert {*names} <= {name.rpartition(".")[2] for _, name in directives()}
    assert all(any(getattr(flax_mha, name) is one for one in DOCUMENTED) for name in names)


@pytest.mark.parametrize("module", [*MODULES, qk_clip, core, table], ids=lambda m: m.__name__)
def test_reference_has_every_name_of_public_modules(module: ModuleType) -> None:
    lacking = [x.__name__ for x in exported(module) if not any(x is one for one in DOCUMENTED)]
    assert not lacking


def test_names_are_documented_once() -> None:
    names = [name for _, name in directives()]
    assert len(names) == len(set(names))


def test_contents_list_every_page() -> None:
    contents = set(re.findall(r"^[\w/-]+$", read("docs/index.md"), re.MULTILINE))
    files = [*DOCS.rglob("*.md"), *DOCS.rglob("*.rst"), *(DOCS / "notebooks").glob("*.py")]
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in files}
    assert contents == pages - {"index"}
