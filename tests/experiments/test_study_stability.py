"""The study of stability: its measure of sensitivity, its models, and a short run."""

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import stability


def test_sensitivity_is_the_mean_loss_above_the_least() -> None:
    """A loss above that of a guess counts as a guess, and so does one that is not finite."""
    guess = math.log(256)
    losses = np.array(
        [[2.0, 3.0, 9.0], [4.0, math.nan, 1.0], [3.0, 3.0, 3.0], [1.0, 1.0, math.inf]]
    )
    expected = [(1 + guess - 2) / 3, (3 + guess - 1) / 3, 0, (guess - 1) / 3]
    np.testing.assert_allclose(stability.sensitivity(losses), expected, rtol=1e-6)


@pytest.mark.slow
def test_models_of_a_seed_differ_by_their_rate_alone() -> None:
    """A step of Adam is proportional to the rate, from the same parameters and data."""
    create, step, _ = stability.make_functions(stability.make_variants()["plain (Adam)"], 10)
    count = len(stability.RATES)
    old = jax.jit(jax.vmap(create))(jnp.arange(2 * count))
    rates = old.opt_state[0]
    np.testing.assert_allclose(rates, np.tile(np.float32(stability.RATES), 2))
    new, found = jax.jit(jax.vmap(step, in_axes=(0, None)))(old, {})
    first, second = np.split(np.asarray(found["loss"]), 2)
    np.testing.assert_allclose(first, first[0], rtol=1e-6)
    assert abs(first[0] - second[0]) > 1e-3
    for before, after in zip(*map(jax.tree.leaves, (old.params, new.params)), strict=True):
        moves = [np.asarray(after[i] - before[i]) / rates[i] for i in (3, count - 1)]
        np.testing.assert_allclose(*moves, rtol=1e-3, atol=1e-4)
        assert np.abs(moves[0]).max() > 0.5


@pytest.mark.sampled(0, slow=0.3)
def test_a_short_run_draws_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stability.png"
    monkeypatch.setattr(stability, "RATES", (1e-2, 3.0))
    monkeypatch.setattr(stability, "HIGH", 3.0)
    monkeypatch.setattr(stability, "POINTS", 4)
    monkeypatch.setattr(sys, "argv", ["", "--steps=12", "--seeds=2", f"--figure={path}"])
    stability.main()
    assert path.stat().st_size < 120_000
    printed = capsys.readouterr().out
    assert all(name in printed for name in stability.make_variants())
