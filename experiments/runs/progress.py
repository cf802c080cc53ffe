"""The progress of a run as a bar or as lines, its speed, and a trace of some steps."""

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column

from experiments import phases
from experiments.counts import work
from experiments.counts.chips import CHIPS, GPUS
from experiments.counts.hlo import Module
from experiments.runs.failures import RunError

_WARM = 3  # the first step that a number of steps counts from: before it compiles


@contextlib.contextmanager
def shown(steps: int, start: int) -> Iterator[Callable[[int, str, str], None]]:
    """Show a live bar on a terminal, and elsewhere lines.

    Yields:
      A function of the step, of a short text for the bar, and of a line (or "").
    """
    if jax.process_index() > 0:
        yield lambda step, short, line: None
    elif not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        with phases.Phase("training", aloud=False) as training:

            def tell(step: int, short: str, line: str) -> None:
                training.detail = f": step {step}/{steps}: {short}"
                if line:
                    phases.say(line)

            yield tell
    else:
        with bar(steps, start, Console(stderr=True)) as show:
            yield show


@contextlib.contextmanager
def bar(steps: int, start: int, console: Console) -> Iterator[Callable[[int, str, str], None]]:
    """Show a bar from the first step on, as wide as the terminal."""
    text = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        SpinnerColumn(), BarColumn(20, table_column=Column(no_wrap=True)),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.description}", table_column=text),
    )  # fmt: skip
    progress = Progress(*columns, console=console, expand=True)
    task = progress.add_task("", total=steps, completed=start)

    def show(step: int, short: str, line: str) -> None:
        progress.update(task, completed=step, description=short)
        progress.start()

    try:
        yield show
    finally:
        progress.stop()


class Speed:
    """The speed of the steps, and the time until the last one.

    The share of the chips' peak (MFU) counts the operations that the model needs, see `flops`. It
    is left out where the table of chips lacks the devices, such as on CPUs.

    Args:
      program: the run's `experiments.trainer.mesh.Program`.
      state: a state of it, to compile its step for.
      batch: a batch of it.
    """

    def __init__(self, program: Any, state: Any, batch: Any) -> None:
        self._program = program
        self._peak = peak(program) if jax.process_index() == 0 else 0.0
        self._flops = flops(program, state, batch) if self._peak else 0

    def text(self, rate: float, left: int) -> str:
        """Return the speed in words.

        Args:
          rate: the steps a second; 0 for unknown.
          left: the steps that are left.
        """
        if not rate:
            return ""
        rows = self._program.config.batch_size * self._program.config.seeds * rate
        # The end is cut off where there is no room.
        parts = [f"{duration(left / rate)} left"] if left else []
        parts.append(f"{rows:,.0f} examples/s")
        if self._peak:
            parts.append(f"MFU {self._flops * rate / self._peak:.1%}")
        return ", ".join(["", *parts])


def peak(program: Any) -> float:
    """Return the peak of a device of the mesh in operations a second, 0 for unknown."""
    devices = list(program.mesh.devices.flat)
    chip = CHIPS.get(devices[0].device_kind) or GPUS.get(devices[0].device_kind)
    if chip is None:
        return 0.0
    # Devices with the same coordinates are the cores of one chip.
    places = Counter(tuple(getattr(device, "coords", None) or (device.id,)) for device in devices)
    return chip.flops / max(places.values())


def flops(program: Any, state: Any, batch: Any) -> int:
    """Return the operations of matmuls that a training step needs, on one device.

    These are three times the operations of the loss, because each matmul has two in the backward
    pass. Recomputation, by `remat` or within a kernel, is left out.

    Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    loss = program.task.loss
    loss = jax.vmap(loss) if program.config.seeds > 1 else loss
    traced = jax.jit(loss).trace(state.params, batch, state.key)
    text = traced.lower().compile().as_text()
    return 3 * (work.flops(Module(text)) + work.pallas_flops(traced.jaxpr.jaxpr))


def duration(seconds: float) -> str:
    """Return seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextlib.contextmanager
def tracing(folder: Path, steps: str | None, start: int) -> Iterator[Callable[[int], None]]:
    """Trace some steps into a folder, for xprof and, as `perfetto_trace.json.gz`, for perfetto.

    Args:
      folder: the folder of the trace, written by process 0.
      steps: FIRST:LAST, or a number of steps, from the third that runs; None for none.
      start: the step that the run starts from.

    Yields:
      A function to be called before each step and after the last.
    """
    first, last = parse_steps(steps, start) if steps is not None else (0, 0)
    tracing = False

    def at(step: int) -> None:
        nonlocal tracing
        if tracing and not first <= step <= last:
            jax.effects_barrier()
            jax.profiler.stop_trace()
            tracing = False
            print(f"traced steps {first} to {step - 1}: {folder}", flush=True)
        elif not tracing and first <= step <= last and jax.process_index() == 0:
            jax.profiler.start_trace(str(folder), create_perfetto_trace=True)
            tracing = True

    try:
        yield at
    finally:
        if tracing:
            jax.profiler.stop_trace()


def parse_steps(steps: str, start: int) -> tuple[int, int]:
    """Return the first and the last step of FIRST:LAST, or of a number of steps."""
    if match := re.fullmatch(r"(\d{1,9}):(\d{1,9})", steps):
        first, last = int(match[1]), int(match[2])
    elif re.fullmatch(r"\d{1,9}", steps):
        first, last = start + _WARM, start + _WARM + int(steps) - 1
    else:
        first, last = 0, 0
    if not 0 < first <= last:
        raise RunError(f"--profile must be a number of steps, or FIRST:LAST of them, got {steps!r}")
    return first, last
