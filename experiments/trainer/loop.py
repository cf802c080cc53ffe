"""The training loop: the latest checkpoint or a fresh state → steps → test metrics.

`one_model` is a step, `train` is everything around it. `mesh` spreads a step over seeds and
devices; `experiments.runs` has the log, the progress and the signals.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from experiments.common import phases
from experiments.common.phases import phase
from experiments.runs.log import Log, Row
from experiments.runs.progress import STOPPED, Watch
from experiments.tasks.task import Batch, Metrics, Params, Task
from experiments.trainer import mesh
from experiments.trainer.checkpoints import Checkpoints
from experiments.trainer.mesh import Program
from experiments.trainer.metrics import check_skipped, evaluate, means
from experiments.trainer.optimizer import make_optimizer


class TrainState(flax.struct.PyTreeNode):
    """The state of training, with a leading axis [seeds] if there are several."""

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    key: jax.Array  # The randomness of a step is a pure function of this and of `step`.


class Result(NamedTuple):
    """The result of `train`."""

    state: TrainState
    metrics: Metrics  # of the test data, [seeds], at the last step
    rows: list[Row]  # the log
    start: int  # the step that training went on from
    compiling: float  # seconds of the first step
    running: float  # seconds of the other steps


def one_model(config: ConfigDict, task: Task) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `create` and `step` for a single seed, not yet jitted."""
    optimizer, schedule = make_optimizer(config)

    def create(seed: jax.Array) -> TrainState:
        init_key, key = jax.random.split(jax.random.key(seed))
        params = task.init(init_key)
        return TrainState(jnp.int32(0), params, optimizer.init(params), key)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        gradient = jax.value_and_grad(task.loss, has_aux=True)
        (loss, metrics), grads = gradient(state.params, batch, key)
        metrics |= {"loss": loss, "gradient_norm": optax.tree.norm(grads)}
        # A loss that is not finite may have a gradient that is.
        grads = jax.tree.map(lambda g: jnp.where(jnp.isfinite(loss), g, jnp.nan), grads)
        # Optax raises floats to integer powers, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            rate = jnp.asarray(schedule(state.step), jnp.float32)
        params = optax.apply_updates(state.params, updates)
        metrics |= {"learning_rate": rate, "skipped": opt_state.notfinite_count}  # in a row
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    return create, step


def build(config: ConfigDict, task: Task, devices: Sequence[jax.Device] | None = None) -> Program:
    """Return the program of a run on a mesh of these devices (default: all there are)."""
    return mesh.build(config, task, *one_model(config, task), devices)


def train(
    program: Program, workdir: Path, profile: str | None = None,
    params: Callable[[], Params | None] = lambda: None,
) -> Result:  # fmt: skip
    """Train from the folder's latest checkpoint, or from the start, to config.steps.

    Args:
      program: the run's program.
      workdir: the run's folder.
      profile: the steps to leave a trace of: FIRST:LAST; None for none.
      params: returns the parameters to start from, asked without a checkpoint; None for fresh ones.
    """
    config, data = program.config, program.batches()
    with program.on_mesh(), Checkpoints(workdir, config.keep_last, config.keep_best) as checkpoints:
        with phase("making the model, or reading its checkpoint"):
            saved = checkpoints.restore(program, data)
            state = saved.state if saved else program.create(program.seeds)
            if saved is None and (first := params()) is not None:
                state = state.replace(params=program.put_params(first))
            tests = [program.put_test(batch) for batch in program.task.test_batches()]
        start, pending = (saved.step, saved.pending) if saved else (0, ())
        tested: Metrics = {}
        with (
            Log(workdir, config, start, pending) as log,
            Watch(program, workdir, start, profile) as run,
        ):
            for step in range(start + 1, config.steps + 1):
                state, metrics = run.step(step, state, program.put(next(data)))
                log.add(metrics)
                last, stop = step == config.steps, run.is_stopped(step) and step < config.steps
                test = last or step % config.evaluate_every == 0
                save = last or step % config.checkpoint_every == 0
                trained, tested = {}, {}
                if test or save or step % config.log_every == 0:
                    series = log.take()
                    check_skipped(config, series, step)
                    trained = means(series)
                    log.write(step, "train", trained)
                if test:
                    tested = evaluate(program, state.params, tests)
                    log.write(step, "test", tested)
                # While steps are left out, the last good checkpoint stays.
                if stop or last or (save and not log.skipping):
                    loss = float(tested["loss"].mean()) if test else None
                    checkpoints.save(step, state, data, log.pending(), loss)
                run.show(step, trained, tested)
                if stop:
                    phases.say(f"stopped at step {step}; to go on: --workdir={workdir}")
                    sys.exit(STOPPED)
            seconds = run.finish(state)
            # A finished run, trained no further, is evaluated here.
            tested = tested or evaluate(program, state.params, tests)
            return Result(state, tested, log.rows, start, *seconds)
