"""Everything around the steps of a run: signals, progress, times, and a trace."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import jax
import numpy as np

from experiments.phases import Phase
from experiments.runs import signals
from experiments.runs.progress import Speed, shown, tracing


class Watch:
    """The surroundings of a run's steps, open inside the context.

    Args:
      program: the run's `experiments.trainer.mesh.Program`.
      workdir: the run's folder.
      start: the step that the run starts from.
      profile: the steps to trace, see `tracing`.

    Attributes:
      is_stopped: a function that `signals.stoppable` yields.
    """

    def __init__(self, program: Any, workdir: Path, start: int, profile: str | None) -> None:
        self._program, self._workdir, self._steps = program, workdir, program.config.steps
        self._profile, self._text = profile, ""
        self._speed: Speed | None = None
        self._start = self._first = self._then = time.perf_counter()
        # The step of the last text, and the seconds in `aside`: of all, and until that text.
        self._shown, self._aside, self._aside_then = start, 0.0, 0.0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            self._show = opened.enter_context(shown(self._steps, self._shown))
            self.is_stopped = opened.enter_context(signals.stoppable())
            folder = self._workdir / "profile"
            self._trace = opened.enter_context(tracing(folder, self._profile, self._shown))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def step(self, step: int, state: Any, batch: Any) -> tuple[Any, Any]:
        """Run a step, compiled at the first call, and return its state and metrics."""
        self._trace(step)
        if self._speed is not None:
            return self._program.step(state, batch)
        with Phase("compiling the step"):
            self._speed = Speed(self._program, state, batch)
            state, metrics = jax.block_until_ready(self._program.step(state, batch))
        self._first = self._then = time.perf_counter()
        self._shown = step
        return state, metrics

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the time inside out of the speed."""
        start = time.perf_counter()
        yield
        self._aside += time.perf_counter() - start

    def show(
        self, step: int, trained: Mapping[str, np.ndarray], tested: Mapping[str, np.ndarray]
    ) -> None:
        """Show the progress, and print a line after a test.

        Args:
          step: the last step, done by the device if there are metrics.
          trained: the metrics of the last steps, or none.
          tested: the metrics of the test data, or none.
        """
        if trained:
            now = time.perf_counter()
            seconds = now - self._then - (self._aside - self._aside_then)
            rate = (step - self._shown) / seconds if seconds > 0 else 0.0
            self._then, self._shown, self._aside_then = now, step, self._aside
            speed = self._speed.text(rate, self._steps - step) if self._speed else ""
            self._text = f"loss {trained['loss'].mean():.4f}{speed}"
        if tested:
            texts = (f"{name} {x.mean():.4f}" for name, x in tested.items())
            self._text += f", test {', '.join(texts)}"
        self._show(step, self._text, f"step {step}/{self._steps}: {self._text}" if tested else "")

    def stop(self, step: int) -> NoReturn:
        """End a run that was asked to stop, after its checkpoint."""
        raise signals.Stopped(f"stopped at step {step}; to go on: --workdir={self._workdir}")

    def finish(self, state: Any) -> tuple[float, float]:
        """Wait for the last state, and return the seconds of the first step and of the others."""
        jax.block_until_ready(state)
        self._trace(self._steps + 1)
        return self._first - self._start, time.perf_counter() - self._first - self._aside
