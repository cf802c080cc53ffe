"""The text task: its data and its windows."""

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from experiments.common.failures import RunError
from experiments.tasks import text


def test_every_tenth_topic_is_held_out() -> None:
    train, test = text.load()
    held = [topics[name] for i, name in enumerate(sorted(topics)) if i % 10 == 0]
    rest = [topics[name] for i, name in enumerate(sorted(topics)) if i % 10]
    assert (train.decode(), test.decode()) == ("\n".join(rest), "\n".join(held))
    # Settings are chosen on validation topics, which are not in the test split.
    other, validation = text.load(split="validation")
    assert len(other) + len(validation) + 1 == len(train)
    assert validation.decode() == "\n".join(rest[::10])


@pytest.mark.sampled(0.08)
@given(st.integers(0, 300), st.integers(1, 40), st.data())
def test_windows_predict_each_byte_once(n: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    written = bytes(data.draw(st.lists(st.integers(1, 255), min_size=n, max_size=n)))
    batch = text.windows(text.Bytes().encode(written), length, stride)
    tokens, predicted = batch["tokens"], batch["weight"] > 0
    assert tokens[:, 1:][predicted].tobytes() == written
    assert tokens[0, :1].tobytes() == text.START
    # In all windows but the first, at least length − stride bytes precede every prediction.
    assert not predicted[1:, : length - stride].any()


def test_text_of_a_user_file(text_config: ConfigDict, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(250)) * 2)
    train, test = text.load(str(path))
    assert (train + test, len(test)) == (path.read_bytes(), 50)
    text_config.data.path = str(path)
    task = text.Text(text_config)
    rows = next(iter(task.batches(0, 8, np.arange(2, 5))))["tokens"]
    assert rows.shape == (3, 17)
    assert all(bytes(row) in text.START + train for row in rows)
    for change, message in (
        ({"data.path": str(tmp_path / "none")}, "must be a file, got .*No such file"),
        ({"length": 450}, "config.length must be in 1 … training tokens − 1=449, got 450"),
    ):
        other = text_config.copy_and_resolve_references()
        other.update_from_flattened_dict(change)
        with pytest.raises(RunError, match=message):
            text.Text(other)
    with pytest.raises(RunError, match=r"stride must be in 1 … config.length=8, got 9"):
        text.windows(text.Bytes().encode(train), 8, 9)
