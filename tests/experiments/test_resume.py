"""A run that was cut off, or whose checkpoint is damaged, ends with the numbers of a whole one."""

import dataclasses
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments import tasks
from experiments.common.failures import RunError
from experiments.trainer import loop
from experiments.trainer.checkpoints import Checkpoints
from experiments.trainer.mesh import Program
from tests.experiments.conftest import small
from tests.experiments.launch import losses

STEPS = 9


class Killed(BaseException):
    """The end of a process that could do nothing about it."""


def configure(*sizes: int) -> ConfigDict:
    """Return a config that saves at steps 3, 6 and 9, with rows of the log between."""
    config = small()
    config.steps, config.log_every, config.evaluate_every = STEPS, 2, 4
    config.mesh.data, config.mesh.fsdp, config.mesh.model = sizes
    return config


@pytest.fixture(scope="module")
def program() -> Program:
    """Return the program of the run, compiled once for all tests."""
    config = configure(1, 1, 1)
    return loop.build(config, tasks.make(config))


@pytest.fixture(scope="module")
def whole(program: Program, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, loop.Result]:
    """Return the folder and the result of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, loop.train(program, folder)


def cut_off(program: Program, folder: Path, at: int, error: type[BaseException] | None) -> None:
    """Train until an error is raised in place of a step, or SIGTERM is sent during it (None)."""

    def step(state: Any, batch: Any) -> Any:
        if int(np.max(jax.device_get(state.step))) + 1 == at:
            if error is not None:
                raise error
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # A second one kills.
        return program.step(state, batch)

    with pytest.raises(error or SystemExit):
        loop.train(dataclasses.replace(program, step=step), folder)


def restored(program: Program, folder: Path) -> tuple[loop.TrainState, Any]:
    """Return the state and data of a run's latest checkpoint."""
    stream = program.batches()
    with program.on_mesh(), Checkpoints(folder, read_only=True) as checkpoints:
        saved = checkpoints.restore(program, stream)
    assert saved is not None
    return saved.state, stream


def numbers(state: Any) -> Any:
    """Return the state with random keys as their numbers."""
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)


def assert_same(result: loop.Result, folder: Path, whole: tuple[Path, loop.Result]) -> None:
    """Assert that state, metrics and log are those of the whole run, to the bit."""
    path, expected = whole
    for name in ("params", "opt_state"):
        pair = jax.device_get((getattr(result.state, name), getattr(expected.state, name)))
        jax.tree.map(np.testing.assert_array_equal, *pair)
    jax.tree.map(np.testing.assert_array_equal, result.metrics, expected.metrics)
    assert result.rows == expected.rows
    assert (folder / "metrics.jsonl").read_bytes() == (path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("ends", [[(2, Killed), (4, None)], [(5, None), (8, Killed)]], ids=str)
def test_interrupted_run_equals_whole_run(
    program: Program, whole: tuple[Path, loop.Result], tmp_path: Path, ends: list[Any]
) -> None:
    folder = tmp_path / "run"
    for at, error in ends:
        cut_off(program, folder, at, error)
    result = loop.train(program, folder)
    assert result.start == (4 if ends[-1][1] is None else 6)
    assert_same(result, folder, whole)
    again = loop.train(program, folder)
    assert again.start == STEPS
    assert_same(again, folder, whole)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 2, 4), (2, 2, 2)], ids=str)
def test_stopped_run_goes_on_over_another_mesh(
    program: Program, whole: tuple[Path, loop.Result], tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    folder, config = tmp_path / "run", configure(*sizes)
    cut_off(program, folder, 5, None)
    other = loop.build(config, tasks.make(config))
    (state, stream), (wanted, alone) = restored(other, folder), restored(program, folder)
    assert jax.tree.map(lambda x: x.sharding, state) == other.shardings
    for one, same in ((numbers(state), numbers(wanted)), (next(stream), next(alone))):
        jax.tree.map(np.testing.assert_array_equal, one, same)
    result = loop.train(other, folder)
    assert result.start == 5
    np.testing.assert_allclose(losses(result.rows), losses(whole[1].rows), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("seeds", "sizes"), [(1, (1, 1, 1)), pytest.param(2, (1, 2, 2), marks=pytest.mark.slow)]
)
def test_new_run_starts_from_the_weights_of_another(
    program: Program, whole: tuple[Path, loop.Result], tmp_path: Path, seeds: int,
    sizes: tuple[int, ...],
) -> None:  # fmt: skip
    """On one device, or for each seed and over a mesh. A checkpoint goes before them."""
    if seeds > 1:
        config = configure(*sizes)
        config.seeds = seeds
        program = loop.build(config, tasks.make(config))
    first: list[Any] = []

    def step(state: Any, batch: Any) -> Any:
        first.append(jax.device_get(state.params))
        return program.step(state, batch)

    params = jax.device_get(whole[1].state.params)
    watched = dataclasses.replace(program, step=step)
    loop.train(watched, tmp_path / "run", params=lambda: params)
    each = jax.tree.map(lambda x: x if seeds == 1 else np.stack([x] * seeds), params)
    jax.tree.map(np.testing.assert_array_equal, first[0], each)
    again = loop.train(watched, tmp_path / "run", params=lambda: pytest.fail("asked"))
    assert again.start == STEPS
    for other in ({"head": params["head"]}, {**params, "head": {"kernel": np.ones((3, 10))}}):
        with pytest.raises(RunError, match=r"must be of a run with the same config.model"):
            loop.train(program, tmp_path / "other", params=lambda other=other: other)


def damaged(path: Path, how: str) -> None:
    """Truncate, remove, or flip a bit of a file."""
    good = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(good[: len(good) // 2])
    else:
        bit = random.Random(how + path.name).randrange(8 * len(good))
        path.write_bytes(
            good[: bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1 :]
        )


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_damaged_checkpoint_gives_way_to_an_older_one(
    program: Program, whole: tuple[Path, loop.Result], tmp_path: Path, how: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    newest = folder / "checkpoints" / str(STEPS)
    damaged(max(newest.glob("state/d/*"), key=lambda path: path.stat().st_size), how)
    capsys.readouterr()
    result = loop.train(program, folder)
    assert f"the checkpoint of step {STEPS} is damaged" in capsys.readouterr().out
    assert result.start == 6
    assert_same(result, folder, whole)
    assert list((folder / "checkpoints.damaged").iterdir())


def test_run_without_a_whole_checkpoint_is_refused(
    program: Program, whole: tuple[Path, loop.Result], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    for path in (folder / "checkpoints").rglob("*"):
        if path.is_file():
            damaged(path, "truncated")
    log = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match="no checkpoint that is whole"):
        loop.train(program, folder)
    assert (folder / "metrics.jsonl").read_bytes() == log
