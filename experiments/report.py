"""Report on a trained run: pictures in its folder, baselines, and the score in words.

    python -m experiments.report runs/digits-…
    python -m experiments.report runs/text-… --data=FILE

The pictures are those of the latest checkpoint, the score is that of the last evaluation. The file
that the run was trained on, if it was one, is read if --data names it.
"""

import functools
from collections.abc import Sequence

import numpy as np
from absl import app

from experiments import finished
from experiments.reports import summary
from experiments.runs import command
from experiments.runs.failures import RunError


def main(argv: Sequence[str]) -> None:
    """Print the report; its last line is the score."""
    opened = finished.open_run(argv[1], finished.DATA.value, finished.TOKENIZER.value)
    run, task, params, rows = finished.load(*opened)
    tests = [row for row in rows if row["split"] == "test"]
    if not tests:
        raise RunError(f"{run.path} has no test metrics yet; train it further")
    last = {name: x for name, x in tests[-1].items() if name not in ("step", "split")}
    metrics = {name: np.atleast_1d(np.asarray(x, np.float64)) for name, x in last.items()}
    summary.report(task, params, run.path, rows, metrics)


if __name__ == "__main__":
    parse = functools.partial(command.parse, words=1, rule="give the folder of one run")
    app.run(main, flags_parser=parse)
