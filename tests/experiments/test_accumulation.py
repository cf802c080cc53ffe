"""Accumulated gradients: of half batches, on meshes, and beside NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from experiments import tasks
from experiments.common import devices
from experiments.trainer import loop
from experiments.trainer.optimizer import make_optimizer


@pytest.fixture
def config(text_config: ConfigDict) -> ConfigDict:
    """Return the config of a small decoder, with an update of every two of four steps."""
    text_config.batch_size, text_config.model.num_kv_heads = 8, 2
    text_config.optimizer.accumulate, text_config.optimizer.warmup = 2, 0.0
    return text_config


def trained(config: ConfigDict) -> tuple[Any, list[Any]]:
    """Return the last state of a run, and the losses of its steps."""
    program = loop.build(config, tasks.make(config))
    data, losses = program.batches(), []
    with program.on_mesh():
        state = program.create(program.seeds)
        for _ in range(config.steps):
            state, metrics = program.step(state, program.put(next(data)))
            losses.append(jax.device_get(metrics["loss"]))
    return state, losses


def assert_close(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), one, other)


@pytest.mark.sampled(0)
def test_accumulation_on_a_mesh_equals_one_device(config: ConfigDict) -> None:
    config.model.dropout_rate = 0.1
    state, losses = trained(config)
    wanted = jax.device_get((state.params, losses))
    config.mesh.update(dict(zip(devices.AXES, (1, 2, 2, 2), strict=True)))
    state, losses = trained(config)
    assert_close(jax.device_get((state.params, losses)), wanted)
    # The sum of gradients is sharded as the parameters.
    sums = state.opt_state.inner_state.acc_grads
    kernel = sums["decoder"]["layers_0"]["attention"]["query"]["kernel"]
    assert kernel.sharding.spec == P("fsdp", "model", None)
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, sums, state.params)
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_two_half_batches_make_the_update_of_one(config: ConfigDict) -> None:
    task = tasks.make(config)
    batches = [next(iter(task.batches(seed, 8, np.arange(8)))) for seed in range(2)]
    one, two = config.copy_and_resolve_references(), config
    one.steps, one.optimizer.accumulate = 2, 1
    create, step = map(jax.jit, loop.one_model(one, task))
    create_two, half = map(jax.jit, loop.one_model(two, task))
    start, state = create(0), create_two(0)
    for whole in batches:
        start, metrics = step(start, whole)
        for i in range(2):
            before = state.params
            state, found = half(state, {name: np.split(x, 2)[i] for name, x in whole.items()})
            assert found["learning_rate"] == metrics["learning_rate"]
            is_same = all(map(np.array_equal, *map(jax.tree.leaves, (before, state.params))))
            assert is_same == (i == 0)
        assert_close(state.params, start.params)


def test_accumulation_leaves_out_gradients_that_are_not_finite(config: ConfigDict) -> None:
    optimizer, _ = make_optimizer(config)

    @jax.jit
    def after(gradients: jax.Array) -> list[tuple[jax.Array, Any]]:
        """Return the parameters and the state of the optimizer after each gradient."""
        params = {"kernel": jnp.ones(3)}
        state, found = optimizer.init(params), []
        for gradient in gradients:
            updates, state = optimizer.update({"kernel": jnp.full(3, gradient)}, state, params)
            params = optax.apply_updates(params, updates)
            found.append((params["kernel"], state))
        return found

    with jax.numpy_dtype_promotion("standard"):
        _, (waiting, first), (new, state) = after(np.array([0.5, np.nan, 0.5], np.float32))
        _, (expected, _), _ = after(np.array([0.5, 0.5, 0], np.float32))
    np.testing.assert_array_equal(new, expected)
    assert (np.asarray(waiting) == 1).all()
    assert (np.asarray(new) < 1).all()
    assert first.notfinite_count == 1
    assert (state.notfinite_count, state.total_notfinite) == (0, 1)
