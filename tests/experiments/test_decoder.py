"""The text task as a decoder to grow: dtypes, loops, recomputation and accumulated gradients."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import pydoc_lm
from experiments import tasks
from experiments.runs import fields, rundir
from experiments.runs.failures import RunError
from experiments.runs.keys import flatten
from experiments.trainer import loop
from experiments.trainer.optimizer import make_optimizer


@pytest.fixture
def config() -> ConfigDict:
    config = pydoc_lm.get_config()
    config.length, config.data.stride, config.batch_size = 16, 16, 4
    config.model.features, config.model.mlp_dim, config.model.num_layers = 16, 16, 2
    config.model.num_heads, config.model.num_kv_heads = 2, 1
    config.steps = 4
    return config


def changed(config: ConfigDict, **model: Any) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config.model.update(model)
    return config


def loss_and_gradient(config: ConfigDict, params: Any) -> Any:
    task = tasks.make(config)
    batch = next(iter(task.batches(0, 4, np.arange(4))))
    gradient = jax.jit(jax.value_and_grad(lambda p: task.loss(p, batch, jax.random.key(0))[0]))
    return gradient(params)


def stacked(params: Any) -> Any:
    """Return parameters for a scanned decoder."""
    decoder = params["decoder"]
    layers = [decoder[f"layers_{i}"] for i in range(2)]
    rest = {name: x for name, x in decoder.items() if not name.startswith("layers_")}
    joined = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    return {**params, "decoder": {**rest, "layers": joined}}


def test_scan_and_remat_change_no_loss_or_gradient(config: ConfigDict) -> None:
    params = jax.jit(tasks.make(config).init)(jax.random.key(0))
    loss, gradient = loss_and_gradient(config, params)
    for model in ({"remat": True}, {"scan": True}, {"scan": True, "remat": True}):
        restack = stacked if "scan" in model else lambda tree: tree
        other = changed(config, **model)
        shapes = jax.eval_shape(tasks.make(other).init, jax.random.key(0))
        assert jax.tree.structure(shapes) == jax.tree.structure(restack(params))
        found, slope = loss_and_gradient(other, restack(params))
        np.testing.assert_allclose(found, loss, rtol=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), slope, restack(gradient)
        )


def test_bfloat16_computes_beside_float32_parameters(config: ConfigDict) -> None:
    params = jax.jit(tasks.make(config).init)(jax.random.key(0))
    loss, _ = loss_and_gradient(config, params)
    with jax.numpy_dtype_promotion("standard"):  # as for users: Flax's norms need it
        found, slope = loss_and_gradient(changed(config, dtype="bfloat16"), params)
    assert found.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(slope)} == {jnp.dtype(jnp.float32)}
    assert found != loss
    np.testing.assert_allclose(found, loss, rtol=0.02)


def test_two_half_batches_make_the_update_of_one(config: ConfigDict) -> None:
    config.optimizer.warmup, config.model.num_layers = 0.0, 1
    task = tasks.make(config)
    batches = [next(iter(task.batches(seed, 4, np.arange(4))))["tokens"] for seed in range(2)]
    one, two = config.copy_and_resolve_references(), config
    one.steps, two.steps, two.optimizer.accumulate = 2, 4, 2
    create, step = map(jax.jit, loop.one_model(one, task))
    create_two, half = map(jax.jit, loop.one_model(two, task))
    start, state = create(0), create_two(0)
    for whole in batches:
        start, metrics = step(start, {"tokens": whole})
        for i, part in enumerate(np.split(whole, 2)):
            before = state.params
            state, found = half(state, {"tokens": part})
            assert found["learning_rate"] == metrics["learning_rate"]
            is_same = all(map(np.array_equal, *map(jax.tree.leaves, (before, state.params))))
            assert is_same == (i == 0)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, start.params
        )


def test_accumulation_leaves_out_gradients_that_are_not_finite(config: ConfigDict) -> None:
    config.optimizer.accumulate, config.optimizer.warmup = 2, 0.0
    optimizer, rate = make_optimizer(config)
    params = {"kernel": jnp.ones(3)}
    good, bad = {"kernel": jnp.full(3, 0.5)}, {"kernel": jnp.full(3, jnp.nan)}

    def after(*gradients: Any) -> tuple[Any, Any]:
        state, new = optimizer.init(params), params
        with jax.numpy_dtype_promotion("standard"):
            for each in gradients:
                updates, state = optimizer.update(each, state, new)
                new = jax.tree.map(jnp.add, new, updates)
        return new["kernel"], state

    new, state = after(good, bad)
    assert (new == 1).all()
    assert state.notfinite_count == 1
    new, state = after(good, bad, good)
    assert (state.notfinite_count, state.total_notfinite) == (0, 1)
    np.testing.assert_array_equal(new, after(good, good)[0])
    assert (new < 1).all()
    assert [float(rate(step)) for step in (0, 2)] == [float(rate(step)) for step in (1, 3)]


def test_run_from_before_a_key_resumes_with_its_old_value(
    config: ConfigDict, tmp_path: Path
) -> None:
    old = config.to_dict()
    for key in fields.ADDED:
        group, name = key.split(".")
        del old[group][name]
    rundir.Run(tmp_path, ConfigDict(old), resumed=False).begin("hash")
    found = rundir.open_run(tmp_path, config, {}).config
    assert flatten(found.to_dict()) == flatten(config.to_dict())
    with pytest.raises(RunError, match=r"model.scan is False there, and True was asked for"):
        rundir.open_run(tmp_path, config, {"model.scan": True})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.dtype", "int8", "model.dtype must be one of float32, bfloat16, float16"),
        ("model.scan", 1, "model.scan must be true or false, got 1"),
        ("model.remat", "yes", "model.remat must be true or false, got 'yes'"),
        ("optimizer.accumulate", 0, "optimizer.accumulate must be a whole number from 1"),
        ("optimizer.accumulate", 3, "steps must be a multiple of .*=3, got 4; try 6"),
    ],
)
def test_wrong_values_are_refused(config: ConfigDict, key: str, value: Any, message: str) -> None:
    values = flatten(config.to_dict())
    with pytest.raises(RunError, match=message):
        fields.check(values | {key: value}, values)
