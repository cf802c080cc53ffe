"""The package hides nothing: no changed classes, read bytecode, or text made at import."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent / "flax_mha"
SOURCES = sorted(ROOT.rglob("*.py"))
ATTRIBUTES = {"__code__", "__closure__", "__wrapped__", "getdoc", "getclosurevars"}
# The one class that is made by a call is that of a swapped model.
ALLOWED = {"interop/contexts.py": {"type(name, bases, namespace)"}}
MOST_CLASSES = 153


def tricks(tree: ast.AST) -> Iterator[str]:
    """Yield the names of hidden mechanisms in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in ATTRIBUTES or node.attr == "overload":
                yield node.attr
            if node.attr == "__class__" and isinstance(node.ctx, ast.Store):
                yield "a replaced __class__"
        elif isinstance(node, ast.Name) and node.id == "overload":
            yield node.id
        elif isinstance(node, ast.FunctionDef) and node.name == "__getattribute__":
            yield node.name
        elif isinstance(node, ast.Constant) and node.value in {"__class__", "__code__"}:
            yield f"the name {node.value}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            if module == "dis" or "dis" in {alias.name for alias in node.names}:
                yield "dis"
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function == "type" and len(node.args) == 3:
                yield "type(name, bases, namespace)"
            if function == "object.__setattr__" and ast.unparse(node.args[0]) != "self":
                yield "object.__setattr__ of another object"


@pytest.mark.parametrize(
    ("code", "trick"),
    [
        ("layer.__class__ = Other", "a replaced __class__"),
        ("setattr(layer, '__class__', Other)", "the name __class__"),
        ("class A:\n def __getattribute__(self, name): pass", "__getattribute__"),
        ("import dis", "dis"),
        ("from dis import get_instructions", "dis"),
        ("key = fn.__code__, fn.__closure__", "__code__"),
        ("fn.__wrapped__(x)", "__wrapped__"),
        ("object.__setattr__(layer, name, x)", "object.__setattr__ of another object"),
        ("inspect.getdoc(fn)", "getdoc"),
        ("Swapped = type('Swapped', (Model,), {})", "type(name, bases, namespace)"),
        ("@overload\ndef f(x): ...", "overload"),
        ("@typing.overload\ndef f(x): ...", "overload"),
    ],
)
def test_each_trick_is_seen(code: str, trick: str) -> None:
    assert trick in set(tricks(ast.parse(code)))


def test_package_uses_no_tricks() -> None:
    found = {path.relative_to(ROOT).as_posix(): set(tricks(ast.parse(path.read_text())))
             for path in SOURCES}  # fmt: skip
    found = {file: names for file, names in found.items() if names}
    assert found == ALLOWED


def test_package_has_few_classes() -> None:
    trees = (ast.parse(path.read_text()) for path in SOURCES)
    count = sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))
    assert count <= MOST_CLASSES
