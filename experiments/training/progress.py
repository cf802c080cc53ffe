"""How far a run is, for people."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.plan import work
from experiments.plan.hlo import Module
from experiments.training.program import Program


@contextlib.contextmanager
def shown(steps: int, start: int) -> Iterator[Callable[[int, str, str], None]]:
    """A live bar on a terminal; elsewhere, a line for each evaluation.

    Yields:
      A function of the step, of a short text for the bar, and of a line (or "").
    """
    if jax.process_index() > 0:
        yield lambda step, short, line: None
    elif not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        yield lambda step, short, line: print(line, flush=True) if line else None
    else:
        columns = (
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=steps, completed=start)
            yield lambda step, short, line: bar.update(task, completed=step, description=short)


class Speed:
    """Says how fast steps are, and for how long they will go on.

    The share of the chips' peak (MFU) counts the operations of matrix products in the compiled
    step, as `experiments.plan` does, recomputation included. It is left out where the table of
    chips lacks the devices, such as on CPUs.

    Args:
      program: of the run.
      state: whose step is compiled, which its first call would do otherwise.
      batch: for it.
    """

    def __init__(self, program: Program, state: Any, batch: Any) -> None:
        self._program = program
        self._peak = peak(program) if jax.process_index() == 0 else 0.0
        self._flops = flops(program, state, batch) if self._peak else 0

    def text(self, rate: float, left: int) -> str:
        """In words.

        Args:
          rate: steps a second; 0 for unknown.
          left: steps that are left.
        """
        if not rate:
            return ""
        rows = self._program.config.batch_size * self._program.config.seeds * rate
        parts = [f"{rows:,.0f} examples/s"]
        if self._peak:
            parts.append(f"MFU {self._flops * rate / self._peak:.1%}")
        if left:
            parts.append(f"{duration(left / rate)} left")
        return ", ".join(["", *parts])


def peak(program: Program) -> float:
    """Operations a second that a device of the mesh can do; 0 for unknown."""
    from experiments.plan import roofline  # which itself compiles the loop's step

    links = roofline.network(list(program.mesh.devices.flat))
    return links.chip.flops / links.cores if links else 0.0


def flops(program: Program, state: Any, batch: Any) -> int:
    """Operations of a step's matrix products on one device."""
    traced = program.step.trace(state, batch)  # type: ignore[attr-defined]
    text = traced.lower().compile().as_text()
    return work.flops(Module(text)) + work.pallas_flops(traced.jaxpr.jaxpr)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
