"""The code in the documentation."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parent.parent.parent
# Pages show how these meet ours, and are run without them where they are not installed.
OPTIONAL = {"torch"}


def read(page: str) -> str:
    """A page, by its path from the root."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language: str, text: str) -> list[str]:
    """What stands between fences of that language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for name, code in fences if name == language]


def run(page: str) -> dict[str, Any]:
    """Runs a page's Python from top to bottom, as a user does, and gives its variables."""
    scope: dict[str, Any] = {"__name__": Path(page).stem}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for code in blocks("python", read(page)):
            if not _lacks(code):
                exec(compile(code, page, "exec"), scope)
    return scope


def _lacks(code: str) -> bool:
    """Whether it imports what may be missing, and is."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import)]
    names = {alias.name for node in nodes for alias in node.names}
    return any(importlib.util.find_spec(name) is None for name in names & OPTIONAL)
