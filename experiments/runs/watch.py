"""Everything around the steps of a run: signals, progress, times, and a trace."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from experiments.phases import Phase
from experiments.runs import signals
from experiments.runs.clock import Clock
from experiments.runs.profile import tracing
from experiments.runs.progress import Speed, shown


class Watch:
    """The surroundings of a run's steps, which `watching` opens and closes.

    Args:
      program: the run's `experiments.trainer.mesh.Program`.
      workdir: the run's folder.
      start: the step that the run starts from.
      show: a function of `shown`.
      is_stopped: a function of `stoppable`.
      trace: a function of `tracing`.
    """

    def __init__(
        self, program: Any, workdir: Path, start: int, show: Callable[[int, str, str], None],
        is_stopped: Callable[[int], bool], trace: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._program, self._workdir, self._steps = program, workdir, program.config.steps
        self._show, self.is_stopped, self._trace = show, is_stopped, trace
        self._clock, self._text = Clock(start), ""
        self._speed: Speed | None = None
        self.aside = self._clock.aside

    def step(self, step: int, state: Any, batch: Any) -> tuple[Any, Any]:
        """Run a step, compiled at the first call, and return its state and metrics.

        Args:
          step: the step's number.
          state: the state before it.
          batch: the batch.
        """
        self._trace(step)
        if self._speed is not None:
            return self._program.step(state, batch)
        with Phase("compiling the step"):
            self._speed = Speed(self._program, state, batch)
            state, metrics = self._program.step(state, batch)
            self._clock.first(step, metrics)
        return state, metrics

    def note(self, step: int, means: Mapping[str, np.ndarray]) -> None:
        """Note the loss of the last steps, and how fast they were."""
        rate = self._speed.text(self._clock.lap(step), self._steps - step) if self._speed else ""
        self._text = f"loss {means['loss'].mean():.4f}{rate}"

    def note_test(self, metrics: Mapping[str, np.ndarray]) -> None:
        """Note the metrics of the test data."""
        texts = (f"{name} {x.mean():.4f}" for name, x in metrics.items())
        self._text += f", test {', '.join(texts)}"

    def show(self, step: int, aloud: bool) -> None:
        """Show the progress.

        Args:
          step: the last step.
          aloud: True to print a line.
        """
        line = f"step {step}/{self._steps}: {self._text}" if aloud else ""
        self._show(step, self._text, line)

    def stop(self, step: int) -> NoReturn:
        """End a run that was asked to stop, after its checkpoint."""
        raise signals.Stopped(f"stopped at step {step}; to go on: --workdir={self._workdir}")

    def finish(self, state: Any) -> tuple[float, float]:
        """Wait for the last state, and return the seconds of the first step and of the others."""
        seconds = self._clock.stop(state)
        self._trace(self._steps + 1)
        return seconds


@contextlib.contextmanager
def watching(program: Any, workdir: Path, start: int, profile: str | None) -> Iterator[Watch]:
    """Open everything around the steps of a run.

    Args:
      program: the run's `experiments.trainer.mesh.Program`.
      workdir: the run's folder.
      start: the step that the run starts from.
      profile: the steps to trace, see `tracing`.
    """
    with (
        shown(program.config.steps, start) as show,
        signals.stoppable() as is_stopped,
        tracing(workdir / "profile", profile, start) as trace,
    ):
        yield Watch(program, workdir, start, show, is_stopped, trace)
