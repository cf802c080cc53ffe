"""The train command, as a user calls it."""

import json
import re
from pathlib import Path

import matplotlib.image
import pytest
from ml_collections import ConfigDict

from experiments import reports, tasks
from experiments.runs import log
from experiments.trainer import loop
from tests.experiments.launch import call

SMALL = (
    "--config.steps=4", "--config.batch_size=16", "--config.evaluate_every=2",
    "--config.log_every=2", "--config.model.features=16", "--config.model.mlp_dim=32",
    "--config.model.num_layers=1",
)  # fmt: skip


@pytest.mark.slow
def test_train_writes_all_files_and_prints_score_last(tmp_path: Path) -> None:
    done = call("train", f"--workdir={tmp_path}", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert not re.search("tpu|TPU", done.stderr)
    *_, written, curves, last = done.stdout.splitlines()
    assert written.startswith(f"written to {tmp_path}: metrics.jsonl, attention.png, curves.png")
    assert curves.endswith(f"tensorboard --logdir={tmp_path / 'tensorboard'}")
    phases = ("loading JAX", "reading the data", "compiling the step", "drawing")
    assert [done.stderr.find(phase) for phase in phases] == sorted(
        done.stderr.index(phase) for phase in phases
    )
    assert re.fullmatch(r"test accuracy \d+\.\d%", last)

    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["steps"], config["optimizer"]["b1"]) == (4, 0.9)
    rows = log.read(tmp_path)
    assert [(row["step"], row["split"]) for row in rows] == [
        (2, "train"), (2, "test"), (4, "train"), (4, "test"),
    ]  # fmt: skip
    assert last == f"test accuracy {100 * rows[-1]['accuracy']:.1f}%"
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    for name in ("curves.png", "attention.png"):
        assert matplotlib.image.imread(tmp_path / name).std() > 0.05
    again = call("train", f"--workdir={tmp_path}", "--config.steps=4")
    assert again.returncode == 0, again.stderr
    assert "finished before, at step 4" in again.stdout
    assert again.stdout.splitlines()[-1] == last

    other = call("train", f"--workdir={tmp_path}", "--config.steps=5")
    assert other.returncode == 1
    assert "steps is 4 there, and 5 was asked for" in other.stderr
    assert "Traceback" not in other.stderr


@pytest.mark.sampled(0)
def test_sharded_demo_matches_one_device(tmp_path: Path) -> None:
    # Two layers: XLA has aborted at the gradients of two gathers in a row.
    flags = (*SMALL, "--config.model.num_layers=2", f"--workdir={tmp_path / 'run'}")
    done = call("train", "--config=configs/digits_sharded.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "cores serve as 8 devices" in done.stdout
    assert "data=2, fsdp=2, model=2" in done.stdout
    config = ConfigDict(json.loads((tmp_path / "run" / "config.json").read_text()))
    config.mesh.data = config.mesh.fsdp = config.mesh.model = 1
    alone = loop.train(loop.build(config, tasks.make(config)), tmp_path / "alone")
    for sharded, row in zip(log.read(tmp_path / "run"), alone.rows, strict=True):
        assert sharded.pop("split") == row.pop("split")
        assert sharded == pytest.approx(row, rel=1e-4, abs=1e-5)
    assert done.stdout.splitlines()[-1] == reports.make(tasks.make(config)).headline(alone.metrics)
