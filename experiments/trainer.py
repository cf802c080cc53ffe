"""The training loop: the latest checkpoint or a fresh state → steps → test metrics."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from experiments import runs
from experiments.data.task import Batch, Params
from experiments.log import Log, Row, progress
from experiments.program import Metrics, Program, TrainState, build, on


class Result(NamedTuple):
    """What `train` leaves."""

    state: TrainState
    metrics: Metrics  # of the test data, [seeds], at the last step
    rows: list[Row]  # the log
    start: int  # the step that training went on from
    compiling: float  # seconds of the first step
    running: float  # seconds of the other steps


def train(program: Program, workdir: Path) -> Result:
    """Trains from the folder's latest checkpoint, or from the start, to config.steps.

    Raises:
      RunError: if the loss is not finite.
      SystemExit: after a checkpoint, if SIGINT or SIGTERM asks to stop.
    """
    config, task = program.config, program.task
    with contextlib.ExitStack() as stack:
        stack.enter_context(on(program.mesh))
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        checkpoints = stack.enter_context(
            ocp.CheckpointManager(workdir.absolute() / "checkpoints", options=options)
        )
        data = program.batches()
        start = checkpoints.latest_step() or 0
        state = _restore(program, checkpoints, data) if start else program.create(program.seeds)
        tests = [program.put_test(batch) for batch in task.test_batches()]
        log = stack.enter_context(Log(workdir, start))
        show = stack.enter_context(progress(config.steps, start))
        stop = stack.enter_context(runs.stoppable())
        clock, pending, text = Clock(), [], ""
        for step in range(start + 1, config.steps + 1):
            state, metrics = program.step(state, program.put(next(data)))
            pending.append(metrics)
            if step == start + 1:
                clock.first(metrics)
            stopping = stop(step) and step < config.steps
            test = step == config.steps or step % config.evaluate_every == 0
            save = step == config.steps or step % config.checkpoint_every == 0 or stopping
            if test or save or step % config.log_every == 0:
                means = _means(pending, step, config)
                pending = []
                log.write(step, "train", means)
                text = f"loss {means['loss'].mean():.4f}"
            with clock.aside():
                if test:
                    tested = evaluate(program, state.params, tests)
                    log.write(step, "test", tested)
                    text += f", {task.headline(tested)}"
                if save:
                    _save(checkpoints, step, state, data)
            show(step, text, f"step {step}/{config.steps}: {text}" if test else "")
            if stopping:
                checkpoints.wait_until_finished()
                line = f"stopped at step {step}; to go on: --workdir={workdir}"
                raise SystemExit(line if jax.process_index() == 0 else 1)
        seconds = clock.stop(state)
        tested = evaluate(program, state.params, tests)
        return Result(state, tested, log.rows, start, *seconds)


def evaluate(program: Program, params: Params, batches: Sequence[Batch]) -> Metrics:
    """The test metrics [seeds]: means over all rows that are not padding."""
    each = jax.device_get([program.evaluate(params, batch) for batch in batches])
    total = jax.tree.map(lambda *x: np.atleast_1d(np.sum(x, axis=0)), *each)
    count = total.pop("count")
    return {name: x / count for name, x in total.items()}


def speedup(program: Program, compiling: float, rounds: int = 5, steps: int = 5) -> float:
    """How much longer the seeds would take one after another, compilation included.

    Steps of all seeds and of one are timed in turn, so that whatever else the machine does slows
    both alike.

    Args:
      program: of several seeds.
      compiling: the seconds that took.
      rounds: how many times each is timed; the median counts.
      steps: how many steps at a time.
    """
    alone = program.config.copy_and_resolve_references()
    alone.seeds = 1
    programs = (program, build(alone, program.task))
    seconds = np.empty((2, rounds + 1))
    with on(program.mesh):
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


def load(program: Program, workdir: Path) -> TrainState:
    """The latest state that a run has saved, on the devices of the program.

    Raises:
      RunError: if there is none.
    """
    with on(program.mesh), ocp.CheckpointManager(workdir / "checkpoints") as checkpoints:
        if checkpoints.latest_step() is None:
            raise runs.RunError(f"{workdir} has no checkpoint yet; train it first")
        return _restore(program, checkpoints, program.batches())


def _restore(program: Program, checkpoints: ocp.CheckpointManager, data: Any) -> TrainState:
    """The latest state; the data iterator is moved to where it was then."""
    restored = checkpoints.restore(
        checkpoints.latest_step(),
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(program.abstract_state()),
            data=ocp.args.JsonRestore(),
        ),
    )
    data.set_state(restored.data)
    return restored.state


def _save(checkpoints: ocp.CheckpointManager, step: int, state: TrainState, data: Any) -> None:
    # The order of the data is the same on all processes: one file serves any number of them.
    checkpoints.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data.get_state())
        ),
    )


def _means(pending: list[Metrics], step: int, config: ConfigDict) -> Metrics:
    """Means [seeds] over the steps up to this one, which must all be finite."""
    fetched = jax.device_get(pending)
    series = jax.tree.map(lambda *x: np.stack(x).reshape(len(x), -1), *fetched)  # [steps, seeds]
    bad = np.argwhere(~np.isfinite(series["loss"] + series["gradient_norm"]))
    if len(bad):
        at, seed = bad[0]
        raise runs.RunError(
            f"not finite at step {step - len(pending) + 1 + at} of seed {config.seed + seed}: "
            f"loss {series['loss'][at, seed]}, gradient norm {series['gradient_norm'][at, seed]}; "
            f"nothing after it was saved; try a smaller config.optimizer.learning_rate or a "
            f"longer config.optimizer.warmup"
        )
    return {name: x.mean(0) for name, x in series.items()}
