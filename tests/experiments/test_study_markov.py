"""The study of Markov chains: its data, its predictors, its ideal heads, and a short run."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.studies import markov


def test_chains_have_matrices_from_a_uniform_dirichlet_distribution() -> None:
    tokens = np.asarray(markov.draw_chains(jax.random.key(0), 40_000, 3))
    same = tokens[:, 1:] == tokens[:, :-1]
    # E[p] = 1/3 and E[p²] = 1/6 for one of three shares; a matrix for all would give 1/9.
    np.testing.assert_allclose(np.bincount(tokens[:, 0]) / len(tokens), 1 / 3, atol=0.01)
    # A second step from the same state repeats the first draw: 1/6 + 2/3 · 1/3.
    np.testing.assert_allclose(same.mean(0), [1 / 3, 7 / 18], atol=0.01)
    np.testing.assert_allclose(same.all(1).mean(), 1 / 6, atol=0.01)


@pytest.mark.sampled(0.13, slow=0.2)
def test_counts_predict_as_a_plain_loop_does() -> None:
    tokens = np.asarray(markov.draw_chains(jax.random.key(1), 5, 20))
    losses = {name: np.asarray(x) for name, x in markov.score_counts(tokens).items()}
    for row in range(5):
        singles, pairs = np.ones(3), np.ones((3, 3))
        for t in range(19):
            now, new = tokens[row, t], tokens[row, t + 1]
            singles[now] += 1
            unigram = -np.log(singles[new] / singles.sum())
            bigram = -np.log(pairs[now, new] / pairs[now].sum())
            np.testing.assert_allclose(losses["unigram"][row, t], unigram, rtol=1e-5)
            np.testing.assert_allclose(losses["bigram"][row, t], bigram, rtol=1e-5)
            pairs[now, new] += 1


@pytest.mark.sampled(0.13, slow=0.2)
def test_ideal_heads_attend_as_a_plain_loop_says() -> None:
    tokens = np.asarray(markov.draw_chains(jax.random.key(2), 3, 12))
    previous, matching = map(np.asarray, markov.ideal_weights(tokens))
    for row in range(3):
        for i in range(12):
            keys = [j for j in range(1, i + 1) if tokens[row, j - 1] == tokens[row, i]] or [i]
            np.testing.assert_array_equal(np.flatnonzero(matching[row, 0, i]), keys)
            np.testing.assert_allclose(matching[row, 0, i, keys], 1 / len(keys), rtol=1e-6)
            np.testing.assert_array_equal(previous[row, 0, i], np.eye(12)[max(0, i - 1)])


@pytest.mark.sampled(0, slow=0.3)
def test_a_short_run_draws_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "markov.png"
    monkeypatch.setattr(markov, "HELD_OUT", 16)
    monkeypatch.setattr(sys, "argv", ["", "--steps=4", "--seeds=2", f"--figure={path}"])
    markov.main()
    assert path.stat().st_size < 120_000
    assert "2 layers" in capsys.readouterr().out
