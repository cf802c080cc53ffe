"""The lines about a run: its speed, its progress and its files."""

import io
import re

import pytest
from rich.console import Console

from experiments.runs import progress


@pytest.mark.parametrize("width", [60, 200])
def test_progress_bar_fits_one_line(width: int) -> None:
    screen = io.StringIO()
    console = Console(width=width, force_terminal=True, file=screen)
    speed = "8,269 examples/s"
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
