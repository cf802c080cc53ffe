"""The lines about a run: its speed, its progress and its files."""

import io
import re
from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict
from rich.console import Console

from configs import pydoc_lm
from experiments import tables, tasks
from experiments.counts import mfu
from experiments.reports import summary
from experiments.runs import progress
from experiments.trainer import loop


@pytest.mark.slow
def test_mfu_counts_the_operations_of_the_model() -> None:
    """By PaLM's formula. Recomputation adds nothing."""
    config = pydoc_lm.get_config()
    config.length, config.data.stride, config.batch_size, config.seeds = 16, 16, 4, 2
    config.model.features, config.model.mlp_dim, config.model.num_layers = 16, 24, 2
    config.model.num_heads, config.model.num_kv_heads, config.mesh.data = 2, 1, 1
    found = set()
    for remat in (False, True):
        config.model.remat = remat
        built = loop.build(config, tasks.make(config))
        with built.on_mesh():
            state, batch = built.abstract_state(), built.abstract_batch()
            found.add(mfu.flops(built, state, batch))
    # 6 for each parameter and token, 12 for each layer, feature, query and key.
    matmuls = sum(x.size for x in jax.tree.leaves(state.params) if x.ndim > 2)  # of both seeds
    expected = 4 * 16 * (6 * matmuls + 2 * 12 * 2 * 16 * 16)
    (flops,) = found
    assert flops == pytest.approx(expected, rel=0.01)


def test_unknown_chip_has_no_mfu(config: ConfigDict) -> None:
    built = loop.build(config, tasks.make(config))
    assert mfu.peak(built) == 0


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (9e4, "25 h 0 min")]
)
def test_durations_are_readable(seconds: float, said: str) -> None:
    assert tables.clock(seconds) == said


@pytest.mark.parametrize("width", [60, 80, 200])
def test_progress_bar_fits_one_line(width: int) -> None:
    screen = io.StringIO()
    console = Console(width=width, force_terminal=True, file=screen)
    speed = "8,269 examples/s, MFU 41.0%"
    with progress.bar(console) as bar:
        text = f"loss 0.6732, 59 min 8 s left, {speed}, test accuracy 96.1% ± 0.2%"
        bar.add_task(text, total=100_000, completed=12_345)
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
    files, curves = summary.list_files(folder)
    names = "metrics.jsonl, attention.png, curves.png, checkpoints/, tensorboard/"
    assert files == f"written to {folder}: {names}"
    assert curves == f"its curves, live: tensorboard --logdir='{folder}/tensorboard'"
    (folder / "profile").mkdir()
    assert summary.list_files(folder)[0].endswith("tensorboard/, profile/")
