"""The names of tensors: one list for taps and for `checkpoint_name`."""

import ast
from pathlib import Path

import flax_mha
from flax_mha.base.tensors import OF_SOFTMAX, POINTS, STORED


def test_all_names_are_in_one_list() -> None:
    tapped: set[str] = set()
    named: set[str] = set()
    for path in Path(flax_mha.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    ast.Name("tap") | ast.Attribute(_, "change" | "last"),
                    [ast.Constant(str(name)), *_],
                ):
                    tapped.add(name)
                case ast.Call(ast.Name("checkpoint_name"), [_, ast.Constant(str(name)), *_]):
                    named.add(name)
    assert tapped == {*POINTS}
    assert named | (tapped & {*STORED}) == {*STORED}
    assert not {*POINTS} & {*OF_SOFTMAX}
