"""How long a run takes."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax


class Clock:
    """Tells the time of the first step, compilation, from that of the others."""

    def __init__(self, step: int) -> None:
        self._start = self._first = self._last = time.perf_counter()
        self._step, self._aside, self._aside_then = step, 0.0, 0.0

    def first(self, step: int, result: Any) -> None:
        """Marks the end of the first step."""
        jax.block_until_ready(result)
        self._first = self._last = time.perf_counter()
        self._step = step

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside does not count."""
        start = time.perf_counter()
        yield
        self._aside += time.perf_counter() - start

    def lap(self, step: int) -> float:
        """Steps a second since the last lap, of which the device has to be done; 0 for none."""
        now = time.perf_counter()
        seconds = now - self._last - (self._aside - self._aside_then)
        steps = step - self._step
        self._last, self._step, self._aside_then = now, step, self._aside
        return steps / seconds if steps and seconds > 0 else 0.0

    def stop(self, result: Any) -> tuple[float, float]:
        """Seconds of the first step, and of the others."""
        jax.block_until_ready(result)
        return self._first - self._start, time.perf_counter() - self._first - self._aside
