"""The report on a finished run, as its own command."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments import reports, tasks
from experiments.runs import rundir
from experiments.runs.fingerprint import fingerprint
from experiments.trainer import loop

ROOT = Path(__file__).parent.parent.parent


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.report", *arguments], cwd=ROOT, capture_output=True,
        text=True, timeout=300, check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


@pytest.mark.sampled(0, slow=0.3)
def test_a_report_says_the_score_of_the_run(config: ConfigDict, tmp_path: Path) -> None:
    task = tasks.make(config)
    rundir.open_run(tmp_path, config, {}).begin(fingerprint(task))
    early = report(str(tmp_path))
    assert early.returncode == 1
    assert "has no checkpoint yet; train it first" in early.stderr
    result = loop.train(loop.build(config, task), tmp_path)
    done = report(str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == reports.make(task).headline(result.metrics)
    assert "RBF SVM 98.3%" in done.stdout
    assert {"curves.png", "attention.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the folder of one run, got []"),
        (["none"], "must be the folder of a run"),
    ],
)
def test_mistakes_are_answered_plainly(arguments: list[str], message: str) -> None:
    done = report(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_task_without_a_report_has_a_plain_one(config: ConfigDict) -> None:
    task = tasks.make(config)
    config.task = "mine"
    plain = reports.make(task)
    assert type(plain) is reports.base.Report
    assert plain.headline({"loss": np.array([0.5, 1.0])}) == "test loss 0.7500"
    assert plain.baselines() == {}
    assert len(fingerprint(task)) == 64
