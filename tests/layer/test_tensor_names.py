"""One list of named tensors, for taps, `checkpoint_name` and the page on looking inside."""

import ast
import re
from pathlib import Path

import flax_mha
from flax_mha.base.tensors import STORED, TENSORS

PAGE = Path(__file__).parent.parent.parent / "docs" / "look-inside.md"


def test_all_names_are_in_one_list() -> None:
    tapped: set[str] = set()
    named: set[str] = set()
    for path in Path(flax_mha.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    ast.Name("tap") | ast.Attribute(_, "last"), [ast.Constant(str(name)), *_]
                ):
                    tapped.add(name)
                case ast.Call(ast.Name("checkpoint_name"), [_, ast.Constant(str(name)), *_]):
                    named.add(name)
    assert tapped == {name for name, x in TENSORS.items() if x.module != "softmax"}
    assert named | {name for name, x in TENSORS.items() if x.named} == {*STORED}


def test_the_page_lists_all_tensors_that_edits_change() -> None:
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+) \|.*\| \[\\\*B, (.*?)\] \|", PAGE.read_text(), re.M)
    listed = {name: shape for names, shape in rows for name in re.findall(r"\w+", names)}
    prefix = {"layer": "attention_", "softmax": "attention_"}
    assert listed == {
        prefix.get(x.module, "") + name: x.shape for name, x in TENSORS.items() if x.editable
    }
