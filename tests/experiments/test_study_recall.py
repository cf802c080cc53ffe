"""The study of recall: its data, its caches, and its program on few steps."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import recall

KINDS = {f"{kind.family} {kind.size}".strip(): kind for kind in recall.make_kinds()}
SMALL = ("full 1 KV head", "full, int8 1 KV head", "window 4 tokens")


def allow() -> Any:
    return jax.numpy_rank_promotion("allow")


def test_each_query_asks_for_a_fact_and_labels_its_value() -> None:
    batch = {name: np.asarray(x) for name, x in recall.draw(jax.random.key(0), 5).items()}
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
    """docs/decoding.md, and one int32 a layer and row for the length."""

    def layers(heads: int, slots: int, token: int) -> int:
        return 2 * (heads * slots * token + 4)

    assert recall.count_bytes(KINDS["full 2 KV head"]) == layers(2, 36, 2 * 32 * 4)
    assert recall.count_bytes(KINDS["full, int8 1 KV head"]) == layers(1, 36, 2 * 32 + 8)
    assert recall.count_bytes(KINDS["window 8 tokens"]) == layers(2, 8, 2 * 32 * 4)
    assert recall.count_bytes(KINDS["latent rank 8"]) == layers(1, 36, (8 + 8) * 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if "int8" not in name])
def test_decoding_answers_as_the_whole_row(name: str, optimized: None) -> None:
    kind, batch = KINDS[name], recall.draw(jax.random.key(1), 8)
    with allow():
        model = kind.model(decode=False)
        params = model.init(jax.random.key(2), batch["tokens"])["params"]
        whole = model.apply({"params": params}, batch["tokens"])
        right = recall.decode(kind, params, batch)
    expected = (whole.argmax(-1) == batch["labels"])[:, 2 * recall.PAIRS :]
    np.testing.assert_array_equal(right, expected)
    assert 0 < jnp.sum(expected) < expected.size


@pytest.mark.slow
def test_a_short_run_draws_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recall.png"
    monkeypatch.setattr(sys, "argv", ["recall", "--steps=4", "--seeds=2", f"--figure={path}"])
    monkeypatch.setattr(recall, "make_kinds", lambda: [KINDS[name] for name in SMALL])
    with allow(), jax.numpy_dtype_promotion("standard"):
        recall.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [row[0] for row in rows] == ["| full", "| full, int8", "| window"]
    assert path.stat().st_size > 10_000
