import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from experiments import tasks
from experiments.common import devices
from experiments.common.failures import RunError
from experiments.trainer import loop, mesh
from tests.experiments.launch import losses


def train(config: ConfigDict, workdir: Path) -> loop.Result:
    return loop.train(loop.build(config, tasks.make(config)), workdir)


def started(config: ConfigDict) -> tuple[loop.TrainState, Any, str]:
    """Return the first state and batch of a program, and its compiled step."""
    built = loop.build(config, tasks.make(config))
    with mesh.on(built.mesh):
        state = built.create(built.seeds)
        batch = built.put(next(built.batches()))
        return state, batch, built.step.lower(state, batch).compile().as_text()


@pytest.mark.sampled(0)
def test_seeds_in_one_step_equal_separate_runs(config: ConfigDict, tmp_path: Path) -> None:
    config.seed, config.seeds = 3, 2
    config.model.dropout_rate = 0.1
    together = train(config, tmp_path / "together")
    assert losses(together.rows).shape == (config.steps, 2)
    assert together.metrics["accuracy"].shape == (2,)
    config.seed, config.seeds = 4, 1
    alone = train(config, tmp_path / "alone")
    np.testing.assert_allclose(losses(together.rows)[:, 1], losses(alone.rows), rtol=1e-5)
    assert np.abs(losses(together.rows)[:, 0] - losses(alone.rows)).max() > 1e-2


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("seeds", "sizes"), [(1, (1, 8, 1)), (1, (2, 2, 2)), (2, (2, 1, 4))], ids=str
)
def test_parameters_and_moments_are_sharded(
    config: ConfigDict, seeds: int, sizes: tuple[int, int, int]
) -> None:
    config.seeds = seeds
    config.mesh.data, config.mesh.fsdp, config.mesh.model = sizes
    state, batch, hlo = started(config)
    _, fsdp, model = sizes
    of_seeds = (None,) * (seeds > 1)
    assert batch["image"].sharding.spec == P(*of_seeds, ("data", "fsdp") if fsdp > 1 else "data")
    moments = state.opt_state.inner_state[1][0]
    for params in (state.params, moments.mu, moments.nu):
        block = params["encoder"]["layers_0"]
        features = "fsdp" if fsdp > 1 else None
        spec = P(*of_seeds, "model", None, features)
        assert block["attention"]["out"]["kernel"].sharding.spec == spec
        kernels = [x for at, x in jax.tree.leaves_with_path(block) if "kernel" in str(at)]
        assert len(kernels) == 6
        for x in kernels:
            assert x.addressable_shards[0].data.size == x.size // (fsdp * model)
    # Parameters are gathered, the rows [16, 16 patches, 16 features] are not.
    gathered = re.findall(r"f32\[([\d,]+)\]\S* all-gather(?:-start)?\(", hlo)
    assert bool(gathered) == (fsdp > 1)
    largest = max((math.prod(map(int, shape.split(","))) for shape in gathered), default=0)
    assert largest < 16**3 / model
    if seeds > 1:
        # Rows 2-way, heads 4-way: scores are [8, 1, 16, 16] per device, never [·, 4, 16, 16].
        assert not any(x in hlo for x in ("16,4,16,16]", "8,4,16,16]", "16,1,16,16]"))
        assert "8,1,16,16]" in hlo or "8,16,16]" in hlo


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh.data": 4, "mesh.model": 4}, "at most the 8 there are, got data=4, fsdp=1, model=4"),
        ({"mesh.data": 3}, r"a multiple of config.mesh.data=3 .*, got 16; try 18"),
        (
            {"mesh.data": 1, "mesh.model": 8},
            r"'heads' counts 4, .* over the 8 .* 'model'",
        ),
        (
            {"mesh.data": 1, "mesh.fsdp": 3, "batch_size": 12},
            r"'embed' counts 16, .* over the 3 .*'",
        ),
        ({"mesh.fsdp": 0}, "at least 1"),
    ],
)
def test_invalid_meshes_and_batches_raise(
    config: ConfigDict, changes: dict[str, Any], message: str
) -> None:
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        loop.build(config, tasks.make(config))


@pytest.mark.parametrize(("batch", "data"), [(12, 6), (11, 1)])
def test_default_mesh_takes_as_many_devices_as_fit(
    config: ConfigDict, batch: int, data: int
) -> None:
    config.mesh.data, config.batch_size = -1, batch
    assert devices.make_mesh(config).shape == {"data": data, "fsdp": 1, "model": 1, "context": 1}


@pytest.mark.parametrize(
    ("kv_heads", "model", "axes"),
    [
        (4, 1, {"context": 2, "ulysses": 4}),
        (4, 4, {"context": 2}),
    ],
)
def test_context_axis_is_split_by_the_heads(
    config: ConfigDict, kv_heads: int, model: int, axes: dict[str, int]
) -> None:
    """If they divide over some of its devices."""
    config.model.num_kv_heads = kv_heads
    config.mesh.model, config.mesh.context = model, 8 // model
    built = devices.make_mesh(config)
    assert built.shape == {"data": 1, "fsdp": 1, "model": model, **axes}
    along = ("context", "ulysses") if "ulysses" in axes else "context"
    assert ("length", along) in mesh.rules(built)


def test_padding_of_test_rows_has_no_weight(config: ConfigDict) -> None:
    config.batch_size, config.mesh.data = 7, 7
    built = loop.build(config, tasks.make(config))
    with mesh.on(built.mesh):
        batch = built.put_test(built.task.test_batches()[0])
    assert batch["image"].shape == (364, 8, 8)
    assert batch["weight"].sum() == 360


@pytest.mark.slow
def test_nonfinite_loss_ends_the_run(config: ConfigDict, tmp_path: Path) -> None:
    config.optimizer.learning_rate, config.optimizer.warmup = 1e30, 0.0
    with pytest.raises(
        RunError, match=r"not finite at step 2 of seed 0, nor .* the 5 steps .*learning_rate"
    ):
        train(config, tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.sampled(0)
def test_nonfinite_step_of_one_seed_is_skipped(config: ConfigDict, tmp_path: Path) -> None:
    config.seeds, config.max_skipped, config.checkpoint_every = 2, 2, 1
    task = tasks.make(config)
    loss = task.loss
    stream = loop.build(config, task).batches()
    # Sums of integers, which do not depend on the order of addition: [steps, seeds].
    sums = np.stack([next(stream)["label"].sum(-1) for _ in range(config.steps)])
    values, counts = np.unique(sums, return_counts=True)
    at, seed = next((i, s) for i, s in np.argwhere(np.isin(sums, values[counts == 1])) if i > 1)

    def poisoned(params: Any, batch: Any, key: jax.Array) -> Any:
        value, metrics = loss(params, batch, key)
        return jnp.where(batch["label"].sum() == sums[at, seed], jnp.nan, value), metrics

    task.loss = poisoned
    result = loop.train(loop.build(config, task), tmp_path)
    rows = [row for row in result.rows if row["split"] == "train"]
    assert np.argwhere([row["skipped"] for row in rows]).tolist() == [[at, seed]]
    assert rows[at]["loss"][seed] is None
    state = result.state.opt_state
    assert state.total_notfinite[seed] == 1
    counts = state.inner_state[1][0].count
    assert counts.tolist() == [config.steps - (i == seed) for i in range(2)]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.params))
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
