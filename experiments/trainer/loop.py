"""The training loop: the latest checkpoint or a fresh state → steps → test metrics.

Read `one_model` for what a step is and `train` for what happens around it. How a step is spread
over seeds and devices is in `program`, what is kept on disk in `checkpoints` and `log`.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.phases import Phase
from experiments.runs import signals
from experiments.runs.clock import Clock
from experiments.runs.log import Log, Row
from experiments.runs.profile import tracing
from experiments.runs.progress import Speed, shown
from experiments.tasks.task import Batch, Params, Task
from experiments.trainer import mesh
from experiments.trainer.checkpoints import Checkpoints, Saved
from experiments.trainer.mesh import Metrics, Program
from experiments.trainer.optimizer import make_optimizer


class TrainState(flax.struct.PyTreeNode):
    """What a step reads and writes; with several seeds, all of it has a leading axis [seeds]."""

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    key: jax.Array  # The randomness of a step is a pure function of this and of `step`.


class Result(NamedTuple):
    """What `train` leaves."""

    state: TrainState
    metrics: Metrics  # of the test data, [seeds], at the last step
    rows: list[Row]  # the log
    start: int  # the step that training went on from
    compiling: float  # seconds of the first step
    running: float  # seconds of the other steps


def one_model(config: ConfigDict, task: Task) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`create` and `step` for a single seed, not yet jitted."""
    optimizer, schedule = make_optimizer(config)

    def create(seed: jax.Array) -> TrainState:
        init_key, key = jax.random.split(jax.random.key(seed))
        params = task.init(init_key)
        return TrainState(jnp.int32(0), params, optimizer.init(params), key)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        gradient = jax.value_and_grad(task.loss, has_aux=True)
        (loss, metrics), grads = gradient(state.params, batch, key)
        norm = optax.tree.norm(grads)
        # A loss that is not finite may have a gradient that is.
        grads = jax.tree.map(lambda g: jnp.where(jnp.isfinite(loss), g, jnp.nan), grads)
        # Optax raises floats to integer powers, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            rate = jnp.asarray(schedule(state.step), jnp.float32)
        params = optax.apply_updates(state.params, updates)
        metrics |= {"loss": loss, "gradient_norm": norm, "learning_rate": rate}
        metrics["skipped"] = opt_state.notfinite_count  # steps in a row, up to this one
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    return create, step


def build(config: ConfigDict, task: Task, devices: Sequence[jax.Device] | None = None) -> Program:
    """The program of a run on a mesh of those devices (default: all there are)."""
    return mesh.build(config, task, *one_model(config, task), devices)


def train(program: Program, workdir: Path, profile: str | None = None) -> Result:
    """Trains from the folder's latest checkpoint, or from the start, to config.steps.

    Args:
      program: of the run.
      workdir: its folder.
      profile: of which steps to leave a trace, see `tracing`.

    Raises:
      RunError: if too many steps in a row are not finite, or no checkpoint is whole.
      Stopped: after a checkpoint, if SIGINT or SIGTERM asks to stop.
    """
    config, task = program.config, program.task
    data = program.batches()
    keep = (workdir, config.keep_last, config.keep_best)
    with program.on_mesh(), Checkpoints(*keep) as checkpoints:
        saved, state, tests = _begin(program, checkpoints, data)
        start = saved.step if saved else 0
        with (
            Log(workdir, config, saved) as log,
            shown(config.steps, start) as show,
            signals.stoppable() as stop,
            tracing(workdir / "profile", profile, start) as trace,
        ):
            clock, text, speed = Clock(start), "", None
            for step in range(start + 1, config.steps + 1):
                trace(step)
                batch = program.put(next(data))
                with contextlib.nullcontext() if speed else Phase("compiling the step"):
                    speed = speed or Speed(program, state, batch)
                    state, metrics = program.step(state, batch)
                    if step == start + 1:
                        clock.first(step, metrics)
                log.add(metrics)
                last, stopping = step == config.steps, stop(step) and step < config.steps
                test = last or step % config.evaluate_every == 0
                save = last or step % config.checkpoint_every == 0
                if test or save or step % config.log_every == 0:
                    found = log.means(step)
                    rate = speed.text(clock.lap(step), config.steps - step)
                    text = f"loss {found['loss'].mean():.4f}{rate}"
                with clock.aside():
                    if test:
                        tested = evaluate(program, state.params, tests)
                        log.write(step, "test", tested)
                        text += f", {task.headline(tested)}"
                    # While steps are left out, the last good checkpoint stays.
                    if stopping or last or (save and not log.skipping):
                        checkpoints.save(step, state, data, log.saved(step))
                show(step, text, f"step {step}/{config.steps}: {text}" if test else "")
                if stopping:
                    checkpoints.wait()
                    raise signals.Stopped(f"stopped at step {step}; to go on: --workdir={workdir}")
            seconds = clock.stop(state)
            trace(config.steps + 1)
            with Phase("evaluating, and writing the last checkpoint"):
                tested = evaluate(program, state.params, tests)
                checkpoints.wait()
            return Result(state, tested, log.rows, start, *seconds)


def _begin(
    program: Program, checkpoints: Checkpoints, data: Any
) -> tuple[Saved | None, TrainState, list[Batch]]:
    """Return the latest checkpoint, if any, the state to begin with, and the test data in place."""
    with Phase("making the model, or reading its checkpoint"):
        saved = checkpoints.restore(program, data)
        state = saved.state if saved else program.create(program.seeds)
        return saved, state, [program.put_test(batch) for batch in program.task.test_batches()]


def evaluate(program: Program, params: Params, batches: Sequence[Batch]) -> Metrics:
    """The test metrics [seeds]: means over all rows that are not padding."""
    each = jax.device_get([program.evaluate(params, batch) for batch in batches])
    total = jax.tree.map(lambda *x: np.atleast_1d(np.sum(x, axis=0)), *each)
    count = total.pop("count")
    return {name: x / count for name, x in total.items()}
