"""Plain words: short sentences in the documentation, and docstrings that name their subject.

Lower a limit when its count falls, and never raise it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Words of a sentence on average, and the sentences with a semicolon, in all pages together.
WORDS, SEMICOLONS = 13, 10
# A docstring begins with none of these words, and does not use "what …" as a noun.
OPENING = re.compile(
    r"(What|Of|How|Whether|Which|Those|That|Where|Whos?e?|Why|So|Not|From now|Such|Others|None|"
    r"Nothing|Under|But|Without|Likewise|Its|See (above|there))\b"
)
NOUN = re.compile(r"\bwhat (?!if\b)\w+")


def sentences(text: str) -> Iterator[list[str]]:
    """Yield the words of each sentence of a page, without code, tables, headings and addresses."""
    text = re.sub(r"^(```|~~~).*?^\1\s*$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\s*(\||#).*$", "", re.sub(r"\]\([^)]*\)", "]", text), flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text):
        for sentence in re.split(r"(?<=[.!?])[*)]*\s+(?=[*(\[`\"A-Z0-9])", paragraph):
            if len(words := sentence.split()) > 1:
                yield words


def docstrings(folder: str) -> Iterator[str]:
    """Yield the docstrings of all modules, classes and functions in a folder."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for path in sorted((ROOT / folder).rglob("*.py")):
        nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
        yield from filter(None, map(ast.get_docstring, nodes))


def test_sentences_are_short() -> None:
    pages = [path for path in PAGES if path.name != "CHANGELOG.md"]
    found = [words for path in pages for words in sentences(path.read_text())]
    assert sum(map(len, found)) / len(found) <= WORDS
    assert sum(";" in " ".join(words) for words in found) <= SEMICOLONS


def test_no_page_has_long_sentences() -> None:
    for path in PAGES:
        if path.name != "CHANGELOG.md" and (found := [*sentences(path.read_text())]):
            assert sum(map(len, found)) / len(found) <= 20, path


@pytest.mark.parametrize("folder", ["flax_mha", "experiments", "tests", "configs"])
def test_docstrings_begin_plainly(folder: str) -> None:
    texts = docstrings(folder)
    wrong = [text for text in texts if OPENING.match(text) or NOUN.search(text.lower())]
    assert not wrong
