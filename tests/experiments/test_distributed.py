"""Several real processes, 2 devices each, train, stop and resume as one."""

import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments import tasks
from experiments.common import devices
from experiments.common.failures import RunError
from experiments.runs import log
from experiments.trainer import loop
from tests.experiments.launch import begin, losses, settings, together
from tests.experiments.test_resume import cut_off, numbers, restored

HEARTBEAT = 10


@pytest.mark.sampled(0)
def test_two_processes_train_stop_and_resume_as_one(
    config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With minimal threads, where programs that wait for each other's devices would deadlock."""
    monkeypatch.setenv("NPROC", "1")
    config.steps, config.mesh.data, config.mesh.model = 12, -1, 2
    flags = settings(config)
    with together(2, tmp_path / "1", *flags, f"--workdir={tmp_path / 'whole'}") as processes:
        first, other = processes.end()
    assert "data=2, fsdp=1, model=2, context=1; 2 processes" in first
    assert first.splitlines()[-1].startswith("test accuracy")
    assert "accuracy" not in other
    whole = log.read(tmp_path / "whole")
    config.mesh.data = config.mesh.model = 1
    built = loop.build(config, tasks.make(config))
    alone = loop.train(built, tmp_path / "alone")
    np.testing.assert_allclose(losses(whole), losses(alone.rows), rtol=0, atol=1e-5)
    # One log of each kind, with each row once.
    assert [row["step"] for row in whole if row["split"] == "train"] == [*range(1, 13)]
    assert len(list((tmp_path / "whole" / "tensorboard").iterdir())) == 1

    parts = tmp_path / "parts"
    with together(2, tmp_path / "2", *flags, f"--workdir={parts}") as processes:
        processes.until((parts / "run.json").exists)  # They are connected now, and compile.
        processes.all[1].send_signal(signal.SIGTERM)
        first, _ = processes.end(75)
        assert "stopped at step" in first
        assert f"to go on: --workdir={parts}" in first
    stopped = log.read(parts)[-1]["step"]
    assert stopped < config.steps
    assert [int(path.name) for path in (parts / "checkpoints").iterdir()] == [stopped]
    with together(2, tmp_path / "3", f"--workdir={parts}") as processes:
        assert "resuming" in processes.end()[0]
    assert log.read(parts) == whole
    ends = [numbers(restored(built, path)[0]) for path in (parts, tmp_path / "whole")]
    assert ends[0].step == config.steps
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.sampled(0)
def test_four_processes_resume_run_of_eight_devices(config: ConfigDict, tmp_path: Path) -> None:
    """Parameters, heads and positions are sharded, and a ring passes keys between processes."""
    config.mesh.data, config.mesh.fsdp, config.mesh.model = 4, 1, 2
    config.model.num_heads = config.model.num_kv_heads = 2
    config.model.kernel = "usp"
    built = loop.build(config, tasks.make(config))
    whole = loop.train(built, tmp_path / "whole")
    half = tmp_path / "half"
    begin(half, config)
    cut_off(built, half, 3, None)
    # Two heads over the four devices of two processes. The ring is between the two.
    sizes = {"data": 1, "fsdp": 2, "model": 1, "context": 4}
    flags = [f"--config.mesh.{axis}={size}" for axis, size in sizes.items()]
    with together(4, tmp_path / "logs", *flags, f"--workdir={half}") as processes:
        first, *_ = processes.end()
    assert "data=1, fsdp=2, model=1, context=2, ulysses=2; 4 processes" in first
    np.testing.assert_allclose(losses(log.read(half)), losses(whole.rows), rtol=0, atol=1e-5)


def test_mesh_must_use_every_process(config: ConfigDict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(RunError, match=r"with 4 processes .* all 8 devices, got data=1"):
        devices.make_mesh(config)
    config.mesh.data, config.batch_size = -1, 12
    with pytest.raises(RunError, match=r"a multiple of config.mesh.data=8 .* got 12; try 16"):
        devices.make_mesh(config)


def test_rows_of_a_process_need_not_be_contiguous(
    config: ConfigDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.mesh.data = 8
    built = loop.build(config, tasks.make(config))
    asked = {}
    monkeypatch.setattr(
        built.task, "batches", lambda seed, size, rows: asked.setdefault("rows", rows)[None]
    )
    sharding = type(built._over_batch(0))
    spans = {d: (slice(4 * i, 4 * i + 2),) for i, d in enumerate(jax.devices()[:4])}
    monkeypatch.setattr(sharding, "addressable_devices_indices_map", lambda self, shape: spans)
    built.batches()
    assert asked["rows"].tolist() == [0, 1, 4, 5, 8, 9, 12, 13]


@pytest.mark.slow
def test_killed_process_ends_the_others(config: ConfigDict, tmp_path: Path) -> None:
    config.steps, config.mesh.data = 100_000, -1
    config.evaluate_every = config.checkpoint_every = 100_000
    with together(
        2, tmp_path / "logs", *settings(config), f"--workdir={tmp_path / 'run'}",
        f"--heartbeat_timeout={HEARTBEAT}",
    ) as processes:  # fmt: skip
        processes.until(lambda: bool(log.read(tmp_path / "run")))
        processes.all[1].kill()
        assert processes.wait()[0] != 0


@pytest.mark.sampled(0)
def test_hosts_with_different_configs_do_not_start(config: ConfigDict, tmp_path: Path) -> None:
    config.mesh.data = -1
    with together(
        2, tmp_path / "logs", *settings(config), f"--workdir={tmp_path / 'run'}",
        each=lambda i: [f"--config.optimizer.b2=0.9{i + 1}"],
    ) as processes:  # fmt: skip
        for said in processes.end(1):
            last = said.splitlines()[-1]
            assert last.startswith("error: all processes need the same config and data, and ")
            assert "optimizer.b2 is 0.91 at process 0 and 0.92 at process 1" in last
    assert not (tmp_path / "run").exists()
