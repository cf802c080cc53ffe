"""The study of recall: its data, its caches, and its program on few steps."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import recall

KINDS = {f"{kind.family} {kind.size}".strip(): kind for kind in recall.make_kinds()}
SMALL = ("full K=1", "full, int8 K=1", "window 8 tokens")


@pytest.fixture(autouse=True)
def promote() -> Iterator[None]:
    """Allow the promotion of ranks and dtypes, as in programs."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def test_each_query_asks_for_a_fact_and_labels_its_value() -> None:
    batch = {
        name: np.asarray(x)
        for name, x in jax.jit(recall.draw, static_argnums=1)(jax.random.key(0), 5).items()
    }
    start = 2 * recall.PAIRS
    for tokens, labels, distance in zip(
        batch["tokens"], batch["labels"], batch["distance"], strict=True
    ):
        facts = dict(zip(tokens[:start:2], tokens[1:start:2], strict=True))
        assert len(facts) == recall.PAIRS
        assert [facts[key] for key in tokens[start:]] == labels[start:].tolist()
        at = np.arange(start, recall.LENGTH)
        np.testing.assert_array_equal(tokens[at - distance], tokens[start:])
    np.testing.assert_array_equal(batch["weight"].sum(1), recall.PAIRS)


def test_bytes_of_caches_are_those_of_the_docs() -> None:
    """Compare with docs/decoding.md, and an int32 a layer for the length, two for a ring buffer."""

    def layers(heads: int, slots: int, token: int, counters: int = 1) -> int:
        return 2 * (heads * slots * token + 4 * counters)

    assert recall.count_bytes(KINDS["full K=2"]) == layers(2, recall.LENGTH, 2 * 32 * 4)
    assert recall.count_bytes(KINDS["full, int8 K=1"]) == layers(1, recall.LENGTH, 2 * 32 + 8)
    assert recall.count_bytes(KINDS["window 8 tokens"]) == layers(2, 8, 2 * 32 * 4, 2)
    assert recall.count_bytes(KINDS["latent rank 16"]) == layers(1, recall.LENGTH, (16 + 8) * 4)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", [name for name in KINDS if "int8" not in name])
def test_decoding_answers_as_the_whole_row(name: str, optimized: None) -> None:
    kind, batch = KINDS[name], recall.draw(jax.random.key(1), 64)
    model = kind.model(decode=False)
    params = model.init(jax.random.key(2), batch["tokens"])["params"]
    whole: Any = model.apply({"params": params}, batch["tokens"])
    right = recall.decode(kind, params, batch)
    expected = (whole.argmax(-1) == batch["labels"])[:, 2 * recall.PAIRS :]
    np.testing.assert_array_equal(right, expected)
    assert 0 < jnp.sum(expected) < expected.size


@pytest.mark.sampled(0, slow=0.3)
def test_a_short_run_draws_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recall.png"
    monkeypatch.setattr(sys, "argv", ["recall", "--steps=4", "--seeds=2", f"--figure={path}"])
    monkeypatch.setattr(recall, "make_kinds", lambda: [KINDS[name] for name in SMALL])
    recall.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [row[0] for row in rows] == ["| full", "| full, int8", "| window"]
    assert path.stat().st_size > 10_000
