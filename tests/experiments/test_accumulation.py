"""Accumulated gradients: of half batches, on meshes, for several seeds, and beside NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from configs import pydoc_lm
from experiments import tasks
from experiments.trainer import loop, mesh
from experiments.trainer.optimizer import make_optimizer


@pytest.fixture
def config() -> ConfigDict:
    """Return the config of a small decoder, with an update of every two of four steps."""
    config = pydoc_lm.get_config()
    config.length, config.data.stride, config.batch_size = 16, 16, 8
    config.model.features, config.model.mlp_dim, config.model.num_layers = 16, 16, 1
    config.model.num_heads = config.model.num_kv_heads = 2
    config.steps, config.optimizer.accumulate, config.optimizer.warmup = 4, 2, 0.0
    config.mesh.data = 1
    return config


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


@pytest.mark.sampled(0, slow=0.16)
def test_accumulation_on_a_mesh_equals_one_device(config: ConfigDict) -> None:
    state, losses = trained(config)
    wanted = jax.device_get((state.params, losses))
    config.mesh.update(dict(zip(mesh.AXES, (1, 2, 2, 2), strict=True)))
    state, losses = trained(config)
    assert_close(jax.device_get((state.params, losses)), wanted)
    # The sum of gradients is sharded as the parameters.
    sums = state.opt_state.inner_state.acc_grads
    kernel = sums["decoder"]["layers_0"]["attention"]["query"]["kernel"]
    assert kernel.sharding.spec == P("fsdp", "model", None)
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, sums, state.params)
    assert all(jax.tree.leaves(same))


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2, 1, 1)])
def test_seeds_accumulate_each_as_alone(config: ConfigDict, sizes: tuple[int, ...]) -> None:
    config.seed, config.seeds = 3, 2
    config.mesh.update(dict(zip(mesh.AXES, sizes, strict=True)))
    together, losses = trained(config)
    config.seeds, config.mesh.data, config.mesh.fsdp = 1, 1, 1
    for i in range(2):
        config.seed = 3 + i
        alone, wanted = trained(config)
        assert_close([x[i] for x in losses], wanted)
        assert_close(jax.tree.map(lambda x, i=i: x[i], together.params), alone.params)


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


@pytest.mark.slow
def test_accumulation_leaves_out_gradients_that_are_not_finite(config: ConfigDict) -> None:
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
