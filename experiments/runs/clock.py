"""The times of a run."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax


class Clock:
    """A clock that tells the time of the first step, compilation, from the time of the others."""

    def __init__(self, step: int) -> None:
        self._start = self._first = self._last = time.perf_counter()
        self._step, self._aside, self._aside_then = step, 0.0, 0.0

    def first(self, step: int, result: Any) -> None:
        """Mark the end of the first step."""
        jax.block_until_ready(result)
        self._first = self._last = time.perf_counter()
        self._step = step

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out the time that passes inside."""
        start = time.perf_counter()
        yield
        self._aside += time.perf_counter() - start

    def lap(self, step: int) -> float:
        """Return the steps a second since the last lap, all done by the device, or 0."""
        now = time.perf_counter()
        seconds = now - self._last - (self._aside - self._aside_then)
        steps = step - self._step
        self._last, self._step, self._aside_then = now, step, self._aside
        return steps / seconds if steps and seconds > 0 else 0.0

    def stop(self, result: Any) -> tuple[float, float]:
        """Return the seconds of the first step, and of the others."""
        jax.block_until_ready(result)
        return self._first - self._start, time.perf_counter() - self._first - self._aside
