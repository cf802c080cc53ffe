"""The study of heads needed: its orders, its importance of heads, and a short run."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.studies import base, heads_needed


def test_masks_remove_the_least_head_and_keep_the_last_of_each_layer() -> None:
    masks = heads_needed.make_masks(np.array([[0.9, 0.8, 0.7], [0.1, 0.3, 0.2]]))
    expected = [
        [[1, 1, 1], [1, 1, 1]],
        [[1, 1, 1], [0, 1, 1]],
        [[1, 1, 1], [0, 1, 0]],
        [[1, 1, 0], [0, 1, 0]],
        [[1, 0, 0], [0, 1, 0]],
    ]
    np.testing.assert_array_equal(masks, expected)


@pytest.mark.sampled(0, slow=0.3)
@pytest.mark.parametrize("name", ["digits", "dates"])
def test_importance_is_the_mean_slope_of_each_rows_loss(name: str) -> None:
    """The slopes of the loss of a row are those of finite differences, row by row."""
    config, task, data, _ = heads_needed.load(name, 1)
    params = jax.jit(task.init)(jax.random.key(0))
    rows = {key: x[:4] for key, x in data.items()}
    found = heads_needed.weigh_heads(task.model, params, rows)
    layers = base.find_layers(params)
    assert found.shape == (len(layers), config.model.num_heads)

    @jax.jit
    def losses(keep: jax.Array) -> jax.Array:
        return heads_needed.evaluate(task.model, base.mask_heads(params, keep), rows)[0]

    slopes = np.zeros(found.shape)
    for at in np.ndindex(found.shape):
        keep, step = np.ones(found.shape, np.float32), 0.02
        keep[at] += step
        above = np.asarray(losses(keep))
        keep[at] -= 2 * step
        slopes[at] = np.mean(np.abs(above - np.asarray(losses(keep)))) / (2 * step)
    expected = slopes / np.linalg.norm(slopes, axis=-1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.sampled(0, slow=0.3)
def test_dates_are_right_where_greedy_decoding_gives_them() -> None:
    _, task, _, test = heads_needed.load("dates", 1)
    params = jax.jit(task.init)(jax.random.key(0))
    rows = {key: x[:40] for key, x in test.items()}
    given = task.translate(params, rows["source"], rows["length"]).tokens
    # Half of the targets are those that the fresh model would give.
    rows["target"] = np.where(np.arange(40)[:, None] % 2, rows["target"], given)
    _, right = heads_needed.evaluate(task.model, {"params": params}, rows)
    np.testing.assert_array_equal(right, (rows["target"] == given).all(-1))
    assert 20 <= right.sum() < 40


@pytest.mark.sampled(0, slow=0.3)
def test_a_short_run_draws_its_figure_and_prunes_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "heads.png"
    for name, rows in {"PAIRS": 200, "WEIGHED": 8, "TESTED": 16}.items():
        monkeypatch.setattr(heads_needed, name, rows)
    monkeypatch.setattr(sys, "argv", ["", "--steps=10", "--seeds=2", f"--figure={path}"])
    heads_needed.main()
    assert path.stat().st_size < 120_000
    assert capsys.readouterr().out.count("accuracy off by ≤ 0.0000") == 4
