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
from experiments.runs.failures import RunError
from experiments.trainer import loop, mesh, metrics


def train(config: ConfigDict, workdir: Path) -> loop.Result:
    return loop.train(loop.build(config, tasks.make(config)), workdir)


def losses(result: loop.Result) -> np.ndarray:
    """Return losses [steps], or [steps, seeds]."""
    return np.asarray([row["loss"] for row in result.rows if row["split"] == "train"])


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))


@pytest.mark.slow
def test_each_state_is_evaluated_once(
    config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At steps 3 and 6. A finished run, started again, evaluates its last state."""
    seen: list[int] = []

    def counted(*given: Any) -> Any:
        seen.append(1)
        return metrics.evaluate(*given)

    monkeypatch.setattr(loop, "evaluate", counted)
    whole = train(config, tmp_path)
    assert len(seen) == 2
    assert_equal(train(config, tmp_path).metrics, whole.metrics)
    assert len(seen) == 3


@pytest.mark.sampled(0, slow=0.16)
def test_seeds_in_one_step_equal_separate_runs(config: ConfigDict, tmp_path: Path) -> None:
    config.seed, config.seeds = 3, 2
    config.model.dropout_rate = 0.1
    together = train(config, tmp_path / "together")
    assert losses(together).shape == (config.steps, 2)
    assert together.metrics["accuracy"].shape == (2,)
    config.seed, config.seeds = 4, 1
    alone = train(config, tmp_path / "alone")
    np.testing.assert_allclose(losses(together)[:, 1], losses(alone), rtol=1e-5)
    assert np.abs(losses(together)[:, 0] - losses(alone)).max() > 1e-2


@pytest.mark.sampled(0, slow=0.16)
def test_training_on_mesh_matches_one_device(config: ConfigDict, tmp_path: Path) -> None:
    config.steps = 50
    config.log_every, config.evaluate_every, config.checkpoint_every = 1, 50, 50
    config.model.dropout_rate = 0.1
    one = train(config, tmp_path / "one")
    for sizes in ((2, 1, 4, 1), (1, 2, 2, 2)):
        config.mesh.update(dict(zip(mesh.AXES, sizes, strict=True)))
        eight = train(config, tmp_path / str(sizes))
        assert len(eight.state.params["head"]["kernel"].sharding.device_set) == 8
        np.testing.assert_allclose(losses(eight), losses(one), rtol=0, atol=1e-5)


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize("seeds", [1, 2])
def test_heads_are_initialized_sharded(config: ConfigDict, seeds: int) -> None:
    config.seeds, config.mesh.data, config.mesh.model = seeds, 2, 4
    built = loop.build(config, tasks.make(config))
    with mesh.on(built.mesh):
        state = built.create(built.seeds)
        batch = built.put(next(built.batches()))
        hlo = built.step.lower(state, batch).compile().as_text()
    lead = (None,) * (seeds > 1)
    copies = (seeds,) * (seeds > 1)
    moments = state.opt_state.inner_state[1][0]
    for params in (state.params, moments.mu, moments.nu):
        attention = params["encoder"]["layers_0"]["attention"]
        for name in ("query", "key", "value"):
            kernel = attention[name]["kernel"]
            assert kernel.sharding.spec == P(*lead, None, "model", None)
            assert {s.data.shape for s in kernel.addressable_shards} == {(*copies, 16, 1, 4)}
        assert attention["out"]["kernel"].sharding.spec[len(lead)] == "model"
        mlp = params["encoder"]["layers_0"]["mlp"]
        assert mlp["up"]["kernel"].sharding.spec == P(*lead, None, "model")
    assert batch["image"].sharding.spec == P(*lead, "data")
    # Rows 2-way, heads 4-way: scores are [8, 1, 16, 16] per device, never [·, 4, 16, 16].
    assert not any(shape in hlo for shape in ("16,4,16,16]", "8,4,16,16]", "16,1,16,16]"))
    assert "8,1,16,16]" in hlo or "8,16,16]" in hlo
    assert "all-gather" not in hlo
    assert "all-reduce" in hlo


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2)], ids=str)
def test_fsdp_shards_parameters_and_moments(config: ConfigDict, sizes: tuple[int, ...]) -> None:
    config.mesh.data, config.mesh.fsdp, config.mesh.model = sizes
    built = loop.build(config, tasks.make(config))
    with mesh.on(built.mesh):
        state = built.create(built.seeds)
        batch = built.put(next(built.batches()))
        hlo = built.step.lower(state, batch).compile().as_text()
    assert batch["image"].sharding.spec == P(("data", "fsdp"))
    moments = state.opt_state.inner_state[1][0]
    for params in (state.params, moments.mu, moments.nu):
        block = params["encoder"]["layers_0"]
        assert block["attention"]["query"]["kernel"].sharding.spec == P("fsdp", "model", None)
        assert block["attention"]["out"]["kernel"].sharding.spec == P("model", None, "fsdp")
        assert block["mlp"]["up"]["kernel"].sharding.spec == P("fsdp", "model")
        kernels = [x for x in jax.tree.leaves(block) if x.ndim > 1 and x.shape != (4, 4)]
        assert len(kernels) == 6
        for x in kernels:
            assert x.addressable_shards[0].data.size == x.size // (sizes[1] * sizes[2])
    # Parameters are gathered, the rows [16, 16 patches, 16 features] are not.
    gathered = re.findall(r"f32\[([\d,]+)\]\S* all-gather(?:-start)?\(", hlo)
    assert gathered
    assert max(math.prod(map(int, shape.split(","))) for shape in gathered) < 16**3 / sizes[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh.data": 4, "mesh.model": 4}, "at most the 8 there are, got data=4, fsdp=1, model=4"),
        ({"mesh.model": 0}, "at least 1"),
        ({"mesh.data": 3}, r"a multiple of config.mesh.data=3 .*, got 16; try 18"),
        (
            {"mesh.data": 1, "mesh.model": 8},
            r"'heads' counts 4, .* over the 8 .* 'model'",
        ),
        (
            {"mesh.data": 1, "mesh.fsdp": 3, "batch_size": 12},
            r"'embed' counts 16, .* over the 3 .*'",
        ),
        ({"mesh.data": 2, "mesh.fsdp": 4, "batch_size": 12}, r"fsdp=4, got 12; try 16"),
        ({"mesh.fsdp": 0}, "at least 1"),
        ({"model.num_heads": 5}, "num_heads=5"),
    ],
)
def test_invalid_meshes_and_batches_raise(
    config: ConfigDict, changes: dict[str, Any], message: str
) -> None:
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        loop.build(config, tasks.make(config))


@pytest.mark.parametrize(("batch", "data"), [(16, 8), (12, 6), (7, 7), (11, 1)])
def test_default_mesh_takes_as_many_devices_as_fit(
    config: ConfigDict, batch: int, data: int
) -> None:
    config.mesh.data, config.batch_size = -1, batch
    assert mesh.make_mesh(config).shape == {"data": data, "fsdp": 1, "model": 1, "context": 1}


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


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize("seeds", [1, 2])
def test_nonfinite_step_is_skipped(
    config: ConfigDict, seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.seeds, config.max_skipped, config.checkpoint_every = seeds, 2, 1
    task = tasks.make(config)
    loss = task.loss

    def poisoned(params: Any, batch: Any, key: jax.Array) -> Any:
        value, metrics = loss(params, batch, key)
        # A sum of integers does not depend on the order of addition.
        bad = (batch["label"].sum() == broken) if broken >= 0 else False
        return jnp.where(bad, jnp.nan, value), metrics

    broken = -1
    stream = loop.build(config, task).batches()
    batches = [next(stream) for _ in range(config.steps)]
    labels = np.stack([np.atleast_2d(b["label"]).sum(-1) for b in batches])  # [steps, seeds]
    (sums, counts) = np.unique(labels, return_counts=True)
    at, seed = next((i, s) for i, s in np.argwhere(np.isin(labels, sums[counts == 1])) if i > 1)
    broken = int(labels[at, seed])
    monkeypatch.setattr(task, "loss", poisoned)
    result = loop.train(loop.build(config, task), tmp_path)
    rows = [row for row in result.rows if row["split"] == "train"]
    skipped = np.asarray([np.atleast_1d(row["skipped"]) for row in rows])
    assert np.argwhere(skipped).tolist() == [[at, seed]]
    assert np.atleast_1d(np.asarray(rows[at]["loss"], object))[seed] is None
    state = result.state.opt_state
    assert np.atleast_1d(state.total_notfinite)[seed] == 1
    counts = np.atleast_1d(state.inner_state[1][0].count)
    assert counts.tolist() == [config.steps - (i == seed) for i in range(seeds)]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.params))
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
