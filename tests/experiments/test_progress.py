"""The lines about a run: its speed, its progress and its files."""

import io
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict
from rich.console import Console

from experiments import tasks
from experiments.plan import compiled
from experiments.reports import written
from experiments.runs import progress
from experiments.trainer import loop


@pytest.mark.slow
def test_speed_counts_the_operations_of_the_compiled_step(
    config: ConfigDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "peak", lambda program: 1e9)
    built = loop.build(config, tasks.make(config))
    with built.on_mesh():
        state = built.create(built.seeds)
        speed = progress.Speed(built, state, built.put(next(built.batches())))
    flops = compiled.step(config, list(built.mesh.devices.flat)).flops
    assert flops > 1e6
    share = f"MFU {flops * 40 / 1e9:.1%}"
    assert speed.text(40.0, 4000) == f", 1 min 40 s left, 640 examples/s, {share}"
    assert speed.text(40.0, 0) == f", 640 examples/s, {share}"
    assert speed.text(0.0, 9) == ""


def test_unknown_chip_has_no_mfu(config: ConfigDict) -> None:
    built = loop.build(config, tasks.make(config))
    assert progress.peak(built) == 0
    assert progress.Speed(built, None, None).text(2.0, 1) == ", 0 s left, 32 examples/s"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (9e4, "25 h 0 min")]
)
def test_durations_are_readable(seconds: float, said: str) -> None:
    assert progress.duration(seconds) == said


@pytest.mark.parametrize("width", [60, 80, 200])
def test_progress_bar_fits_one_line(width: int) -> None:
    screen = io.StringIO()
    console = Console(width=width, force_terminal=True, file=screen)
    speed = "8,269 examples/s, MFU 41.0%"
    with progress.bar(100_000, 12_000, console) as show:
        show(12_345, f"loss 0.6732, 59 min 8 s left, {speed}, test accuracy 96.1% ± 0.2%", "")
    shown = [line.strip("\r ") for line in re.split("\n|\x1b\\[2K", screen.getvalue())]
    lines = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line) for line in shown if "12345" in line]
    assert lines
    for line in lines:
        assert len(line) <= width
        assert "━" in line
        assert "12345/100000 loss 0.6732, 59 min" in line
        assert line.count("left") <= 1
        assert ("test accuracy 96.1% ± 0.2%" in line) == (width == 200)
    # Nothing else prints the duration.
    assert not re.search(r"\d:\d\d", screen.getvalue())


def test_existing_files_of_a_run_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    for name in ("metrics.jsonl", "curves.png", "attention.png"):
        (folder / name).touch()
    files, curves = written.lines(folder)
    names = "metrics.jsonl, attention.png, curves.png, checkpoints/, tensorboard/"
    assert files == f"written to {folder}: {names}"
    assert curves == f"its curves, live: tensorboard --logdir='{folder}/tensorboard'"
    (folder / "profile").mkdir()
    assert written.lines(folder)[0].endswith("tensorboard/, profile/")
