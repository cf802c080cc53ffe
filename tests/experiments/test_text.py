"""The text task: its data, its n-gram baseline, and its windows."""

import math
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from configs import pydoc_lm
from experiments import reports
from experiments.reports.text import witten_bell
from experiments.runs.failures import RunError
from experiments.tasks import text


@pytest.fixture
def small() -> ConfigDict:
    config = pydoc_lm.get_config()
    config.length, config.data.stride = 32, 16
    config.model.features, config.model.mlp_dim, config.model.num_layers = 16, 16, 1
    return config


def test_every_tenth_topic_is_held_out() -> None:
    train, test = text.load()
    held = [topics[name] for i, name in enumerate(sorted(topics)) if i % 10 == 0]
    rest = [topics[name] for i, name in enumerate(sorted(topics)) if i % 10]
    assert (train.decode(), test.decode()) == ("\n".join(rest), "\n".join(held))
    # Settings are chosen on validation topics, which are not in the test split.
    other, validation = text.load(split="validation")
    assert len(other) + len(validation) + 1 == len(train)
    assert validation.decode() == "\n".join(rest[::10])


@pytest.mark.sampled(0.13, slow=0.2)
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


@given(st.binary(max_size=60), st.binary(max_size=8), st.integers(1, 4))
def test_n_gram_probabilities_sum_to_one(train: bytes, before: bytes, order: int) -> None:
    bits = witten_bell(train, before, order) * len(before) if before else 0.0
    next_bits = [
        witten_bell(train, before + bytes([byte]), order) * (len(before) + 1) - bits
        for byte in range(256)
    ]
    assert sum(2**-b for b in next_bits) == pytest.approx(1, rel=1e-9)


def test_n_gram_matches_hand_computation() -> None:
    # "a" occurs twice in 3 bytes of 2 kinds and never after "b"; "b" always follows "a".
    unigram = (2 + 2 / 256) / (3 + 2)
    after_start = (1 + unigram) / (1 + 1)
    expected = -math.log2(after_start)
    assert witten_bell(b"aba", b"a", order=2) == pytest.approx(expected)


@pytest.mark.slow
def test_uniform_model_takes_eight_bits_per_byte(small: ConfigDict) -> None:
    task = text.Text(small)
    params = jax.tree.map(jnp.zeros_like, jax.eval_shape(task.init, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    batch = task.test_batches()[0]
    found = jax.jit(task.evaluate)(params, batch)
    assert found["bits_per_byte"] / found["count"] == pytest.approx(8, rel=1e-5)
    counts = [int(batch["weight"].sum()) for batch in task.test_batches()]
    assert sum(counts) == len(task.test)
    scores = reports.make(task).baselines()
    assert 2.0 < scores["Witten-Bell 6-gram"] < scores["xz"] < scores["gzip"] < 3.5


def test_text_of_a_user_file(small: ConfigDict, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(250)) * 2)
    train, test = text.load(str(path))
    assert (train + test, len(test)) == (path.read_bytes(), 50)
    small.data.path = str(path)
    task = text.Text(small)
    rows = next(iter(task.batches(0, 8, np.arange(2, 5))))["tokens"]
    assert rows.shape == (3, 33)
    assert all(bytes(row) in text.START + train for row in rows)
    for change, message in (
        ({"data.path": str(tmp_path / "none")}, "must be a file, got .*No such file"),
        ({"length": 450}, "config.length must be in 1 … training tokens − 1=449, got 450"),
    ):
        other = small.copy_and_resolve_references()
        other.update_from_flattened_dict(change)
        with pytest.raises(RunError, match=message):
            text.Text(other)
    with pytest.raises(RunError, match=r"stride must be in 1 … config.length=8, got 9"):
        text.windows(text.Bytes().encode(train), 8, 9)
