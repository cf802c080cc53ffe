"""A checkpoint restores on any other mesh."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import digits
from experiments import tasks
from experiments.trainer import loop, mesh
from tests.experiments.checked import flat, restored
from tests.experiments.test_distributed import stopping

AT, END = 3, 6


def configure(data: int, fsdp: int, model: int) -> ConfigDict:
    config = digits.get_config()
    config.steps, config.batch_size = END, 16
    config.log_every, config.evaluate_every, config.checkpoint_every = 1, END, END
    config.model.features, config.model.mlp_dim, config.model.num_layers = 16, 32, 1
    config.model.num_heads, config.model.num_kv_heads = 4, 4
    config.mesh.data, config.mesh.fsdp, config.mesh.model = data, fsdp, model
    return config


def build(*sizes: int) -> mesh.Program:
    config = configure(*sizes)
    return loop.build(config, tasks.make(config))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, dict[str, Any]]:
    """Return the folder of a run stopped on 8 devices, its further losses, and its state."""
    built = build(2, 2, 2)
    folder = tmp_path_factory.mktemp("whole")
    with pytest.raises(SystemExit):
        loop.train(dataclasses.replace(built, step=stopping(built, AT)), folder / "stopped")
    state, _ = restored(built, folder / "stopped")
    result = loop.train(built, folder / "whole")
    return folder / "stopped", losses(result), jax.device_get(flat(state))


def losses(result: loop.Result) -> np.ndarray:
    return np.asarray([row["loss"] for row in result.rows if row["split"] == "train"])


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 4, 1), (2, 1, 2), (1, 2, 4), (8, 1, 1), (1, 8, 1)],
    ids=str,
)
def test_state_restores_bitwise_on_another_mesh(whole: Any, sizes: tuple[int, ...]) -> None:
    folder, _, expected = whole
    built = build(*sizes)
    state, stream = restored(built, folder)
    assert jax.tree.map(lambda x: x.sharding, state) == built.shardings
    found = flat(state)
    assert set(found) == set(expected)
    for name, x in found.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
    # The data resumes too: the next batch is the one of the uninterrupted run.
    fresh = built.batches()
    for _ in range(AT):
        next(fresh)
    jax.tree.map(np.testing.assert_array_equal, next(stream), next(fresh))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_training_resumes_on_another_mesh(
    whole: Any, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    folder, expected, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    result = loop.train(build(*sizes), tmp_path / "run")
    assert result.start == AT
    np.testing.assert_allclose(losses(result), expected, rtol=0, atol=1e-5)
