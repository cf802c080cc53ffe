"""The study of sinks: its data, its best loss, its measures, and its program on few steps."""

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import sinks


@pytest.fixture(autouse=True)
def promote() -> Iterator[None]:
    """Allow the promotion of ranks and dtypes, as in programs."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def test_a_trigger_repeats_the_token_before_it() -> None:
    batch = jax.jit(sinks.draw, static_argnums=1)(jax.random.key(0), 64)
    tokens, labels = np.asarray(batch["tokens"]), np.asarray(batch["labels"])
    np.testing.assert_array_equal(tokens[:, 0], sinks.FIRST)
    np.testing.assert_array_equal(tokens[:, 1:], labels[:, :-1])
    assert labels.max() < sinks.TOKENS
    older, last, following = tokens[:, 1:-1], tokens[:, 2:], labels[:, 2:]
    is_trigger = last < sinks.TRIGGERS
    np.testing.assert_array_equal(following[is_trigger], older[is_trigger])
    assert 0.02 < (following == older)[~is_trigger].mean() < 0.5


def test_the_best_loss_is_that_of_the_chain() -> None:
    batch = jax.jit(sinks.draw, static_argnums=1)(jax.random.key(1), 3)
    found = jax.jit(sinks.compute_best)(batch)
    chain, losses = sinks.make_chain(), []
    np.testing.assert_allclose(chain.sum(1), 1.0)
    for tokens, labels in zip(
        np.asarray(batch["tokens"]), np.asarray(batch["labels"]), strict=True
    ):
        for i, (last, label) in enumerate(zip(tokens, labels, strict=True)):
            if i == 0:
                losses.append(np.log(sinks.TOKENS))
            elif last < sinks.TRIGGERS and i > 1:
                losses.append(0.0)
            else:
                losses.append(-np.log(chain[last, label]))
    np.testing.assert_allclose(found, np.mean(losses), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sinks.KINDS)
def test_weights_are_those_of_the_layer(kind: str) -> None:
    model = sinks.make_model(sinks.KINDS[kind][0])
    params = model.init(jax.random.key(0), jnp.zeros((1, sinks.LENGTH), jnp.int32))["params"]
    found = sinks.measure(model, params, jax.random.key(1))
    total = float(found["sum"])
    assert (abs(total - 1) < 1e-5) == (kind == "softmax")
    assert 0 < found["first"] < found["share"] + 1e-6
    assert found["top"] > 0


@pytest.mark.slow
def test_the_sink_off_by_one_is_not_trained() -> None:
    model = sinks.make_model({"sinks": True})
    batch = sinks.draw(jax.random.key(2), 2)
    for task, is_frozen in ((sinks.Task, True), (sinks.base.Labelled, False)):
        made = task(model, sinks.LENGTH)
        params = made.init(jax.random.key(0))
        gradient, _ = jax.grad(made.loss, has_aux=True)(params, batch, jax.random.key(0))
        of_sinks = gradient["decoder"]["layers_0"]["attention"]["sinks"]
        assert (abs(of_sinks).max() == 0) == is_frozen


@pytest.mark.sampled(0, slow=0.3)
def test_a_short_run_draws_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sinks.png"
    monkeypatch.setattr(sys, "argv", ["sinks", "--steps=4", "--seeds=2", f"--figure={path}"])
    sinks.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [row[0] for row in rows] == [f"| {kind}" for kind in sinks.KINDS]
    assert path.stat().st_size > 10_000
