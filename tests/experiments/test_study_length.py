"""The study of lengths: its data, its scores, and its program on few steps."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import length


@pytest.fixture(autouse=True)
def promote() -> Iterator[None]:
    """Allow the promotion of ranks and dtypes, as in programs."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("task", length.TASKS)
def test_rows_hold_input_output_and_end(task: str) -> None:
    n = np.array([1, 3, 5, 6])
    make = jax.jit(length.make, static_argnums=(0, 3))
    batch = make(task, jax.random.key(0), jnp.asarray(n), 6)
    rows = np.concatenate([batch["tokens"], batch["labels"][:, -1:]], 1)
    np.testing.assert_array_equal(batch["labels"], rows[:, 1:])
    for row, weight, size in zip(rows, np.asarray(batch["weight"]), n, strict=True):
        x = row[:size].tolist()
        y = sorted(x) if task == "sort" else x
        ends = [length.END] * (14 - 2 * size - 1)
        assert row.tolist() == [*x, length.START, *y, *ends]
        assert max(x) < length.TOKENS
        # The labels that count are the output and one END.
        assert row[1:][weight].tolist() == [*y, length.END]


class Told:
    """A model that is told the row, and mistakes the END if `is_wrong`."""

    def __init__(self, is_wrong: bool) -> None:
        self.end = 0 if is_wrong else length.END

    def apply(self, _: Any, tokens: jax.Array) -> jax.Array:
        row = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=length.END)
        row = jnp.where(row == length.END, self.end, row)
        return jax.nn.one_hot(row, length.TOKENS + 2)


def test_an_output_is_exact_if_its_end_is_too() -> None:
    score = jax.jit(length.score, static_argnums=(0, 1, 2))
    exact, right = score(Told(False), "sort", 3, {})
    np.testing.assert_array_equal([exact, right], 1.0)
    exact, right = score(Told(True), "sort", 3, {})
    np.testing.assert_array_equal(exact, 0.0)
    n = np.asarray(length.LENGTHS)
    np.testing.assert_allclose(right, n / (n + 1), rtol=1e-6)


@pytest.mark.sampled(0, slow=0.3)
def test_a_short_run_draws_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "length.png"
    monkeypatch.setattr(sys, "argv", ["length", "--steps=4", "--seeds=2", f"--figure={path}"])
    monkeypatch.setattr(length, "TASKS", ("sort",))
    length.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert {row[1] for row in rows} == {*length.ENCODINGS}
    assert path.stat().st_size > 10_000
