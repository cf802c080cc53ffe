"""A run that version 0.3 was stopped in resumes, and trains on as it would have with 0.3."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

SAVED = Path(__file__).parent / "saved" / "run_0.3.zip"  # Stopped at step 21 of 60.
# By split and step: the losses of the same run by 0.3, without a stop.
LOSSES = {
    ("train", 30): 2.322938, ("train", 40): 2.289549, ("train", 50): 2.275045,
    ("train", 60): 2.283996, ("test", 40): 2.272065, ("test", 60): 2.269683,
}  # fmt: skip


@pytest.mark.slow
def test_a_run_of_0_3_resumes(tmp_path: Path) -> None:
    with zipfile.ZipFile(SAVED) as saved:
        saved.extractall(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", f"--workdir={tmp_path}"],
        cwd=Path(__file__).parent.parent.parent, env=env | {"JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "39 steps on cpu" in done.stdout
    after = (tmp_path / "metrics.jsonl").read_text()
    assert after.startswith(before)
    rows = [json.loads(line) for line in after.removeprefix(before).splitlines()]
    losses = {(row["split"], row["step"]): row["loss"] for row in rows}
    assert losses.keys() == LOSSES.keys()
    for key, loss in LOSSES.items():
        np.testing.assert_allclose(losses[key], loss, rtol=1e-3)
