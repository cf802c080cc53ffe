"""How long a run takes."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax


class Clock:
    """Tells the time of the first step, compilation, from that of the others."""

    def __init__(self) -> None:
        self._start = self._first = time.perf_counter()
        self._aside = 0.0

    def first(self, result: Any) -> None:
        """Marks the end of the first step."""
        jax.block_until_ready(result)
        self._first = time.perf_counter()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside does not count."""
        start = time.perf_counter()
        yield
        self._aside += time.perf_counter() - start

    def stop(self, result: Any) -> tuple[float, float]:
        """Seconds of the first step, and of the others."""
        jax.block_until_ready(result)
        return self._first - self._start, time.perf_counter() - self._first - self._aside
