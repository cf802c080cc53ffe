"""Plain words: docstrings that name their subject."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# A docstring begins with none of these words, and does not use "what …" as a noun.
OPENING = re.compile(
    r"(What|Of|How|Whether|Which|Those|That|Where|Whos?e?|Why|So|Not|From now|Such|Others|None|"
    r"Nothing|Under|But|Without|Likewise|Its|See (above|there))\b"
)
NOUN = re.compile(r"\bwhat (?!if\b)\w+")


def docstrings(folder: str) -> Iterator[str]:
    """Yield the docstrings of all modules, classes and functions in a folder."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for path in sorted((ROOT / folder).rglob("*.py")):
        nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
        yield from filter(None, map(ast.get_docstring, nodes))


@pytest.mark.parametrize("folder", ["flax_mha", "experiments", "tests", "configs"])
def test_docstrings_begin_plainly(folder: str) -> None:
    texts = docstrings(folder)
    wrong = [text for text in texts if OPENING.match(text) or NOUN.search(text.lower())]
    assert not wrong
