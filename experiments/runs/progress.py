"""Everything around the steps of a run: signals, a line of progress, its speed, and a trace."""

import contextlib
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column

from experiments.common import phases, tables
from experiments.common.failures import RunError

STOPPED = 75  # the exit status: EX_TEMPFAIL of sysexits.h, "try again later"
_QUIET = 4.0  # seconds between two lines of progress, where there is no bar


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[int], bool]]:
    """Turn the first SIGINT or SIGTERM into a request that the loop can read; the second kills.

    Of several processes, a signal to one stops all of them after the same step.

    Yields:
      A function of a step, called after each, that returns True if the run is to stop.
    """
    asked, together = False, jax.distributed.is_initialized()
    # JAX itself listens to SIGTERM where processes run together, and tells the others.
    numbers = (signal.SIGINT,) if together else (signal.SIGINT, signal.SIGTERM)

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        if together:
            signal.raise_signal(signal.SIGTERM)

    def stop(step: int) -> bool:
        return multihost_utils.reached_preemption_sync_point(step) if together else asked

    before = [signal.signal(number, ask) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Watch:
    """What surrounds the steps of a run, open inside the context.

    Args:
      program: the run's `experiments.trainer.mesh.Program`.
      workdir: the run's folder.
      start: the step that the run starts from.
      profile: the steps to trace, see `tracing`.

    Attributes:
      is_stopped: a function that `stoppable` yields.
    """

    def __init__(self, program: Any, workdir: Path, start: int, profile: str | None) -> None:
        self._program, self._workdir, self._profile = program, workdir, profile
        self._steps = program.config.steps
        self._start = self._first = self._then = self._said = time.perf_counter()
        self._shown = start  # the last step that was shown
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            self.is_stopped = opened.enter_context(stoppable())
            folder = self._workdir / "profile"
            self._trace = opened.enter_context(tracing(folder, self._profile))
            if sys.stderr.isatty() and jax.process_index() == 0:
                self._progress = bar(Console(stderr=True))
                self._bar = self._progress.add_task("", total=self._steps, completed=self._shown)
                opened.callback(self._progress.stop)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def step(self, step: int, state: Any, batch: Any) -> tuple[Any, Any]:
        """Run a step, compiled at the first call, and return its state and metrics."""
        self._trace(step)
        if self._first > self._start:
            return self._program.step(state, batch)
        with phases.phase("compiling the step"):
            state, metrics = jax.block_until_ready(self._program.step(state, batch))
        self._first = self._then = time.perf_counter()
        self._shown = step
        if self._progress:
            self._progress.start()
        return state, metrics

    def show(
        self, step: int, trained: Mapping[str, np.ndarray], tested: Mapping[str, np.ndarray]
    ) -> None:
        """Show the progress: a bar on a terminal, a line now and then elsewhere, and each test.

        Args:
          step: the last step, done by the device if there are metrics.
          trained: the metrics of the last steps, or none.
          tested: the metrics of the test data, or none.
        """
        if self._progress:
            self._progress.update(self._bar, completed=step)
        if not trained:
            return
        now = time.perf_counter()
        rate = (step - self._shown) / (now - self._then)
        self._then, self._shown = now, step
        parts = [f"loss {trained['loss'].mean():.4f}"]
        # A test stays on the screen, in a line of 80 columns without the speed.
        if tested:
            parts += [f"test {name} {x.mean():.4f}" for name, x in tested.items()]
        else:
            parts += self._speed(rate, self._steps - step)
        line = f"step {step}/{self._steps}: {', '.join(parts)}"
        if self._progress:
            self._progress.update(self._bar, description=", ".join(parts))
            if tested:
                self._progress.console.print(line, highlight=False)
        elif tested or now - self._said > _QUIET:
            phases.say(line)
            self._said = now

    def _speed(self, rate: float, left: int) -> list[str]:
        """Return the speed in words, from the steps per second and the steps that are left."""
        if not rate:
            return []
        rows = self._program.config.batch_size * self._program.config.seeds * rate
        parts = [f"{tables.clock(left / rate)} left"] if left else []
        return [*parts, f"{rows:,.0f} examples/s"]

    def finish(self, state: Any) -> tuple[float, float]:
        """Wait for the last state, and return the seconds of the first step and of the others."""
        jax.block_until_ready(state)
        self._trace(self._steps + 1)
        return self._first - self._start, time.perf_counter() - self._first


def bar(console: Console) -> Progress:
    """Return a bar in one line as wide as the terminal, which begins at its `start()`."""
    text = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        SpinnerColumn(), BarColumn(20, table_column=Column(no_wrap=True)),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.description}", table_column=text), console=console, expand=True,
    )  # fmt: skip


@contextlib.contextmanager
def tracing(folder: Path, steps: str | None) -> Iterator[Callable[[int], None]]:
    """Trace some steps into a folder, for xprof and, as `perfetto_trace.json.gz`, for perfetto.

    Args:
      folder: the folder of the trace, written by process 0.
      steps: FIRST:LAST; None for no trace.

    Yields:
      A function to be called before each step and after the last.
    """
    first, last = parse_steps(steps) if steps is not None else (0, 0)
    with contextlib.ExitStack() as opened:

        def at(step: int) -> None:
            if step == first and jax.process_index() == 0:
                trace = jax.profiler.trace(str(folder), create_perfetto_trace=True)
                opened.enter_context(trace)
            elif first and step == last + 1:
                jax.effects_barrier()
                opened.close()
                phases.say(f"traced steps {first} to {last}: {folder}")

        yield at


def parse_steps(steps: str) -> tuple[int, int]:
    """Return the first and the last step of FIRST:LAST."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", steps)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < first <= last:
        raise RunError(f"--profile must be FIRST:LAST, two steps, got {steps!r}; try 10:15")
    return first, last
