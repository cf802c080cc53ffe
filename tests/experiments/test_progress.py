"""The lines about a run: its speed, its progress and its files."""

import io
import re

import jax
import pytest
from ml_collections import ConfigDict
from rich.console import Console

from experiments import tasks
from experiments.common.counts import mfu
from experiments.runs import progress
from experiments.trainer import loop


@pytest.mark.slow
def test_mfu_counts_the_operations_of_the_model(text_config: ConfigDict) -> None:
    """By PaLM's formula. Recomputation adds nothing."""
    text_config.seeds = 2
    found = set()
    for remat in (False, True):
        text_config.model.remat = remat
        built = loop.build(text_config, tasks.make(text_config))
        with built.on_mesh():
            state, batch = built.abstract_state(), built.abstract_batch()
            found.add(mfu.flops(built, state, batch))
    # 6 for each parameter and token, 12 for each layer, feature, query and key.
    matmuls = sum(x.size for x in jax.tree.leaves(state.params) if x.ndim > 2)  # of both seeds
    expected = 4 * 16 * (6 * matmuls + 2 * 12 * 2 * 16 * 16)
    (flops,) = found
    assert mfu.peak(built) == 0  # of a CPU
    assert flops == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("width", [60, 200])
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
