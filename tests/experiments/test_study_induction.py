"""The study of induction heads: its probe, its sets of heads, their removal, and a short run."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import base, induction


def test_repeated_bytes_have_one_earlier_copy() -> None:
    repeated = np.asarray(induction.repeat_orders(jax.random.key(0)))
    half = induction.LENGTH // 2
    np.testing.assert_array_equal(repeated[:, half:], repeated[:, : half + 1])
    assert all(len(set(row[:half])) == half for row in repeated)


@pytest.mark.sampled(0.13, slow=0.2)
def test_every_second_sequence_repeats_distinct_tokens() -> None:
    tokens = np.asarray(induction.draw_sequences(jax.random.key(0), 64))
    periods = set()
    for row in tokens[1::2]:
        period = next(i for i in range(1, len(row)) if row[i] == row[0])
        assert len(set(row[:period])) == period
        np.testing.assert_array_equal(row[period:], row[:-period])
        periods.add(period)
    assert periods == set(range(*induction.PERIODS))
    assert not any((row[4:] == row[:-4]).all() for row in tokens[::2])


@pytest.mark.parametrize(("number", "count"), [(1, 3), (3, 3), (4, 3), (3, 6), (2, 0)])
def test_random_sets_have_as_many_of_the_other_heads(number: int, count: int) -> None:
    rng = np.random.default_rng(0)
    score = rng.permutation(np.concatenate([rng.uniform(0.4, 1, count), np.zeros(8 - count)]))
    sets = induction.choose_heads(jnp.asarray(score.reshape(2, 4)), number, jax.random.key(0))
    sets = np.asarray(sets).reshape(1 + induction.DRAWS, 8)
    best = np.argsort(-score)[: min(number, count)]
    np.testing.assert_array_equal(np.flatnonzero(sets[0]), np.sort(best))
    np.testing.assert_array_equal(sets[1:].sum(1), min(number, 8 - count))
    assert not sets[1:, score > 0].any()
    assert len(np.unique(sets[1:], axis=0)) > 1 or count == 6


@pytest.mark.slow
def test_a_model_whose_heads_are_means_sees_no_other_token() -> None:
    model = base.attention_only(2, 2, 8, 5)
    tokens = jax.random.randint(jax.random.key(0), (4, 6), 0, 5)
    params = model.init(jax.random.key(1), tokens)["params"]
    means = base.mean_outputs(model, params, tokens)
    shape = (2, 1, 2, 1)
    same = base.edit_layers(params, "attention_z", jnp.ones(shape), jnp.zeros(shape))
    whole = model.apply({"params": params}, tokens)
    np.testing.assert_allclose(model.apply(same, tokens), whole, rtol=1e-6)
    removed = base.edit_layers(params, "attention_z", jnp.zeros(shape), means)
    changed = tokens.at[:, :-1].set(0)
    last = model.apply(removed, tokens)[:, -1]
    np.testing.assert_allclose(model.apply(removed, changed)[:, -1], last, rtol=1e-5, atol=1e-6)
    assert np.abs(last - whole[:, -1]).max() > 1e-3


@pytest.mark.sampled(0, slow=0.3)
def test_a_short_run_draws_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "induction.png"
    monkeypatch.setattr(induction, "HELD_OUT", 4)
    monkeypatch.setattr(induction, "BATCH", 2)
    monkeypatch.setattr(sys, "argv", ["", "--steps=4", "--seeds=2", f"--figure={path}"])
    induction.main()
    assert path.stat().st_size < 120_000
    assert "induction heads: [0 0]" in capsys.readouterr().out
