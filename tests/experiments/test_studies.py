"""The studies: their data and measures, and a run of few steps of each."""

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import (
    heads,
    heads_needed,
    induction,
    length,
    markov,
    recall,
    sinks,
    stability,
)

LAYERS = [
    layer
    for kind, layers in recall.KINDS.items()
    if kind != "full, int8"
    for layer in layers.values()
]
KEY = jax.random.key(0)
# What a run of few steps prints, and smaller sizes for it.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads_needed": ("dates, 24 left", {"PAIRS": 200, "WEIGHED": 8, "TESTED": 16}),
    "induction": ("induction heads: [0 0]", {"HELD_OUT": 4, "BATCH": 2}),
    "length": ("| sort | RoPE | 32 |", {"TASKS": ("sort",)}),
    "markov": ("only these two:", {"HELD_OUT": 16}),
    "recall": ("| full, int8 | K=1 | 3,464 |", {
        "KINDS": {name: {"K=1": recall.KINDS[name]["K=1"]} for name in ("full", "full, int8")},
    }),
    "sinks": ("| softpick |", {}),
    "stability": ("Muon", {"RATES": (1e-2, 3.0), "HIGH": 3.0}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def promote() -> Iterator[None]:
    """Allow the promotion of ranks and dtypes, as in programs."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", RUNS)
def test_a_short_run_prints_its_answer_and_draws_its_figure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study, path = importlib.import_module(f"experiments.studies.{name}"), tmp_path / "figure.png"
    answer, sizes = RUNS[name]
    for key, value in sizes.items():
        monkeypatch.setattr(study, key, value)
    monkeypatch.setattr(sys, "argv", ["", "--steps=12", "--seeds=2", f"--figure={path}"])
    study.main()
    assert 10_000 < path.stat().st_size < 120_000
    assert answer in capsys.readouterr().out


def test_masks_remove_the_least_head_and_keep_the_last_of_each_layer() -> None:
    masks = heads.make_masks(np.array([[0.9, 0.8, 0.7], [0.1, 0.3, 0.2]]))
    rows = ["111 111", "111 011", "111 010", "110 010", "100 010"]
    assert [" ".join("".join(map(str, x)) for x in mask.astype(int)) for mask in masks] == rows


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", heads_needed.SHAPES)
def test_importance_is_the_mean_slope_of_each_rows_loss(name: str) -> None:
    """The slopes of the loss of a row are those of finite differences, row by row."""
    _, task, data, _ = heads_needed.load(name, 1)
    params, rows = jax.jit(task.init)(KEY), {key: x[:4] for key, x in data.items()}
    shape = heads_needed.SHAPES[name]
    losses = jax.jit(lambda keep: heads_needed.evaluate(task.model, params, keep, rows))
    slopes = np.zeros(shape)
    for at in np.ndindex(shape):
        step = np.zeros(shape, np.float32)
        step[at] = 0.02
        above, below = (np.asarray(losses(1 + sign * step)[0]) for sign in (1, -1))
        slopes[at] = np.mean(np.abs(above - below))
    expected = slopes / np.linalg.norm(slopes, axis=-1, keepdims=True)
    found = heads_needed.weigh_heads(task.model, params, rows, shape)
    np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.sampled(0.08)
def test_every_second_sequence_repeats_distinct_tokens() -> None:
    draw = jax.jit(induction.draw_sequences, static_argnums=1)
    tokens = np.asarray(draw(KEY, 64)["tokens"])
    for row in tokens[1::2]:
        period = next(i for i in range(1, len(row)) if row[i] == row[0])
        assert period in range(*induction.PERIODS)
        assert len(set(row[:period])) == period
        np.testing.assert_array_equal(row[period:], row[:-period])
    assert not any((row[4:] == row[:-4]).all() for row in tokens[::2])
    repeated, half = np.asarray(induction.repeat_orders(KEY)["tokens"]), induction.LENGTH // 2
    np.testing.assert_array_equal(repeated[:, half:], repeated[:, :half])
    assert all(len(set(row[:half])) == half for row in repeated)


@pytest.mark.parametrize("task", length.TASKS)
def test_rows_hold_input_output_and_end(task: str) -> None:
    n = np.array([1, 3, 5, 6])
    batch = jax.jit(length.make, static_argnums=(0, 3))(task, KEY, jnp.asarray(n), 6)
    rows = np.concatenate([batch["tokens"], batch["labels"][:, -1:]], 1)
    np.testing.assert_array_equal(batch["labels"], rows[:, 1:])
    for row, weight, size in zip(rows, np.asarray(batch["weight"]), n, strict=True):
        x = row[:size].tolist()
        y = sorted(x) if task == "sort" else x
        assert row.tolist() == [*x, length.START, *y, *[length.END] * (14 - 2 * size - 1)]
        assert max(x) < length.TOKENS
        assert row[1:][weight].tolist() == [*y, length.END]  # the labels that count


class Told:
    """A model that is told the row, and gives `end` for END."""

    def __init__(self, end: int) -> None:
        self.end = end

    def apply(self, _: Any, tokens: jax.Array) -> jax.Array:
        row = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=length.END)
        return jax.nn.one_hot(jnp.where(row == length.END, self.end, row), length.TOKENS + 2)


@pytest.mark.parametrize("end", [length.END, 0])
def test_an_output_is_exact_if_its_end_is_too(end: int) -> None:
    score = jax.jit(length.score, static_argnums=(0, 1))
    exact, right = score(Told(end), "sort", {})
    n = np.asarray(length.LENGTHS)
    np.testing.assert_array_equal(exact, float(end == length.END))
    np.testing.assert_allclose(right, 1.0 if end else n / (n + 1), rtol=1e-6)


def test_chains_have_matrices_from_a_uniform_dirichlet_distribution() -> None:
    chains = jax.jit(markov.draw_chains, static_argnums=1)(KEY, 5_000)
    tokens = np.asarray(chains["tokens"])[:, :3]
    same = tokens[:, 1:] == tokens[:, :-1]
    # E[p] = 1/3 and E[p²] = 1/6 for one of three shares; a matrix for all would give 1/9.
    np.testing.assert_allclose(np.bincount(tokens[:, 0]) / len(tokens), 1 / 3, atol=0.025)
    # A second step from the same state repeats the first draw: 1/6 + 2/3 · 1/3.
    np.testing.assert_allclose(same.mean(0), [1 / 3, 7 / 18], atol=0.025)
    np.testing.assert_allclose(same.all(1).mean(), 1 / 6, atol=0.025)


@pytest.mark.sampled(0.08)
def test_counts_and_ideal_heads_are_those_of_a_plain_loop() -> None:
    @jax.jit
    def run(key: jax.Array) -> Any:
        batch = markov.draw_chains(key, 3)
        return batch, markov.score_counts(batch), heads.ideal_weights(batch["tokens"])

    batch, losses, (previous, matching) = jax.device_get(run(jax.random.key(1)))
    for row, tokens in enumerate(batch["tokens"]):
        singles, pairs = np.ones(3), np.ones((3, 3))
        for i, (now, new) in enumerate(zip(tokens, batch["labels"][row], strict=True)):
            singles[now] += 1
            unigram, bigram = singles[new] / singles.sum(), pairs[now, new] / pairs[now].sum()
            np.testing.assert_allclose(losses["unigram"][row, i], -np.log(unigram), rtol=1e-4)
            np.testing.assert_allclose(losses["bigram"][row, i], -np.log(bigram), rtol=1e-4)
            pairs[now, new] += 1
            keys = [j for j in range(1, i + 1) if tokens[j - 1] == now] or [i]
            np.testing.assert_array_equal(np.flatnonzero(matching[row, 0, i]), keys)
            np.testing.assert_allclose(matching[row, 0, i, keys], 1 / len(keys), rtol=1e-6)
            assert previous[row, 0, i, max(0, i - 1)] == previous[row, 0, i].sum() == 1


def test_each_query_asks_for_a_fact_and_labels_its_value() -> None:
    drawn = jax.jit(recall.draw, static_argnums=1)(KEY, 5)
    batch, start = {name: np.asarray(x) for name, x in drawn.items()}, 2 * recall.PAIRS
    rows = zip(batch["tokens"], batch["labels"], batch["distance"], strict=True)
    for tokens, labels, distance in rows:
        facts = dict(zip(tokens[:start:2], tokens[1:start:2], strict=True))
        assert len(facts) == recall.PAIRS
        assert [facts[key] for key in tokens[start:]] == labels[start:].tolist()
        at = np.arange(start, recall.LENGTH)
        np.testing.assert_array_equal(tokens[at - distance], tokens[start:])
    np.testing.assert_array_equal(batch["weight"].sum(1), recall.PAIRS)


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [("full", "K=2", 24_584), ("window", "8 tokens", 8_208), ("latent", "rank 16", 4_616)],
)
def test_bytes_of_caches_are_those_of_the_docs(kind: str, size: str, expected: int) -> None:
    assert recall.count_bytes(recall.KINDS[kind][size]) == expected


@pytest.mark.sampled(0)
@pytest.mark.parametrize("layer", LAYERS)
def test_decoding_answers_as_the_whole_row(layer: Any, optimized: None) -> None:
    batch = recall.draw(jax.random.key(1), 64)
    model = recall.make_model(layer, decode=False)
    params = model.init(jax.random.key(2), batch["tokens"])["params"]
    whole: Any = model.apply({"params": params}, batch["tokens"])
    expected = (whole.argmax(-1) == batch["labels"])[:, 2 * recall.PAIRS :]
    np.testing.assert_array_equal(recall.decode(layer, params, batch), expected)
    assert 0 < jnp.sum(expected) < expected.size


def test_a_trigger_repeats_the_token_before_it() -> None:
    batch = jax.jit(sinks.draw, static_argnums=1)(KEY, 64)
    tokens, labels = np.asarray(batch["tokens"]), np.asarray(batch["labels"])
    np.testing.assert_array_equal(tokens[:, 0], sinks.FIRST)
    np.testing.assert_array_equal(tokens[:, 1:], labels[:, :-1])
    assert labels.max() < sinks.TOKENS
    older, is_trigger, following = tokens[:, 1:-1], tokens[:, 2:] < sinks.TRIGGERS, labels[:, 2:]
    np.testing.assert_array_equal(following[is_trigger], older[is_trigger])
    assert 0.02 < (following == older)[~is_trigger].mean() < 0.5
    losses = -np.log(sinks.CHAIN[tokens, labels])
    losses[:, 2:][is_trigger] = 0
    np.testing.assert_allclose(batch["best"], losses.mean(), rtol=1e-5)


def test_only_the_softmax_off_by_one_keeps_its_sinks() -> None:
    params = {"sinks": np.zeros(2, np.float32), "other": np.zeros(2, np.float32)}
    slopes = jax.tree.map(np.ones_like, params)
    for kind in ("softmax, learned sink", sinks.OFF_BY_ONE):
        optimizer = sinks.make_optimizer(kind, 10)

        @jax.jit
        def update(optimizer: Any = optimizer) -> Any:
            _, state = optimizer.update(slopes, optimizer.init(params), params)
            return optimizer.update(slopes, state, params)[0]  # The rate of the first step is 0.

        updates = update()
        assert np.all(updates["other"])
        assert np.any(updates["sinks"]) == (kind != sinks.OFF_BY_ONE)


def test_sensitivity_is_the_mean_loss_above_the_least() -> None:
    """A loss above that of a guess counts as a guess, and so does one that is not finite."""
    guess = math.log(256)
    losses = np.array([[2.0, 3.0, 9.0], [4.0, math.nan, 1.0]])
    expected = [(1 + guess - 2) / 3, (3 + guess - 1) / 3]
    np.testing.assert_allclose(stability.sensitivity(losses), expected, rtol=1e-6)
