"""The time that training several seeds in one step saves."""

import time

import jax
import numpy as np

from experiments.trainer.loop import build
from experiments.trainer.mesh import Program


def speedup(program: Program, compiling: float, rounds: int = 5, steps: int = 5) -> float:
    """Return how many times longer the seeds would take one by one, compilation included.

    Steps of all seeds and of one are timed in turn, so that any other load of the machine slows
    both alike.

    Args:
      program: the program of several seeds.
      compiling: the seconds that compiling it took.
      rounds: the number of times that each is timed; the median counts.
      steps: the steps at a time.
    """
    alone = program.config.copy_and_resolve_references()
    alone.seeds = 1
    programs = (program, build(alone, program.task))
    seconds = np.empty((2, rounds + 1))
    with program.on_mesh():
        states = [p.create(p.seeds) for p in programs]
        batches = [p.put(next(p.batches())) for p in programs]
        for turn in range(rounds + 1):
            for i, p in enumerate(programs):
                start = time.perf_counter()
                for _ in range(steps if turn else 1):
                    states[i], metrics = p.step(states[i], batches[i])
                jax.block_until_ready(metrics)
                seconds[i, turn] = time.perf_counter() - start
    # The first turn compiles the program of one seed; that of several is compiled already.
    together, apart = np.median(seconds[:, 1:], axis=1) / steps * program.config.steps
    return float(program.config.seeds * (seconds[1, 0] + apart) / (compiling + together))
