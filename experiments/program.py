"""What a run executes: one jitted step for any task, any number of seeds, any mesh."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import flax.struct
import grain
import grain.experimental
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from experiments import runs
from experiments.data.task import Batch, Params, Task
from flax_mha import sharding

Metrics = dict[str, Any]  # each of shape [seeds]


class TrainState(flax.struct.PyTreeNode):
    """What a step reads and writes; with several seeds, all of it has a leading axis [seeds]."""

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    key: jax.Array  # The randomness of a step is a pure function of this and of `step`.


def make_mesh(config: ConfigDict) -> Mesh:
    """A (data, model) mesh of the sizes in config.mesh; data=-1 takes all devices it can use.

    Raises:
      RunError: if devices, batch and sizes do not fit together.
    """
    data, model, have = config.mesh.data, config.mesh.model, jax.device_count()
    if data == -1 and model >= 1:
        # As many as split the batch evenly, so that the default runs on whatever there is.
        data = max(
            (n for n in range(1, have // model + 1) if config.batch_size % n == 0), default=1
        )
    if min(data, model) < 1 or data * model > have:
        raise runs.RunError(
            f"config.mesh needs data·model devices, at least 1 and at most the {have} there are, "
            f"got data={config.mesh.data}, model={model}; on a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count=N makes N of them"
        )
    if config.batch_size % data:
        raise runs.RunError(
            f"config.batch_size must be a multiple of config.mesh.data={data}, "
            f"got {config.batch_size}; try {-(-config.batch_size // data) * data}"
        )
    kinds = (AxisType.Auto, AxisType.Auto)
    devices = jax.devices()[: data * model]
    return jax.make_mesh((data, model), ("data", "model"), axis_types=kinds, devices=devices)


@contextlib.contextmanager
def on(mesh: Mesh) -> Iterator[None]:
    """Makes the mesh and the sharding rules ambient."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        yield


def make_optimizer(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW with clipped gradients; the learning rate warms up linearly, then falls as a cosine."""
    o = config.optimizer
    warmup = min(round(o.warmup * config.steps), config.steps - 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0 if warmup else o.learning_rate, o.learning_rate, warmup, config.steps,
        o.final * o.learning_rate,
    )  # fmt: skip

    def kernels(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: any(getattr(entry, "key", None) == "kernel" for entry in path), params
        )

    adamw = optax.adamw(schedule, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay, mask=kernels)
    return optax.chain(optax.clip_by_global_norm(o.clip_norm), adamw), schedule


@dataclasses.dataclass(frozen=True)
class Program:
    """What a run executes, on the ambient mesh."""

    config: ConfigDict
    task: Task
    mesh: Mesh
    shardings: TrainState
    create: Callable[[jax.Array], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    evaluate: Callable[[Params, Batch], Metrics]

    @property
    def seeds(self) -> jax.Array:
        """What `create` takes: a number, or [seeds] of them."""
        first, count = self.config.seed, self.config.seeds
        return jnp.uint32(first) if count == 1 else jnp.arange(first, first + count, dtype="uint32")

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(self.create, self.seeds), self.shardings,
        )  # fmt: skip

    def batches(self) -> grain.DatasetIterator:
        """This process's rows of the training batches, [seeds, rows, ...] if seeds are several."""
        size = self.config.batch_size
        spans = self._over_batch(0).addressable_devices_indices_map((size,)).values()
        bounds = [index[0].indices(size)[:2] for index in spans if index]
        rows = slice(min(start for start, _ in bounds), max(stop for _, stop in bounds))
        seeds = range(self.config.seed, self.config.seed + self.config.seeds)
        streams = [self.task.batches(seed, size, rows) for seed in seeds]
        if len(streams) == 1:
            return iter(streams[0])
        together = grain.experimental.ZipIterDataset(streams)
        return iter(together.map(lambda each: jax.tree.map(lambda *x: np.stack(x), *each)))

    def put(self, local: Batch) -> Batch:
        """A training batch as global arrays, from the rows of each process."""
        axis = int(self.config.seeds > 1)

        def place(x: np.ndarray) -> jax.Array:
            shape = (*x.shape[:axis], self.config.batch_size, *x.shape[axis + 1 :])
            return jax.make_array_from_process_local_data(self._over_batch(axis), x, shape)

        return jax.tree.map(place, local)

    def put_test(self, batch: Batch) -> Batch:
        """A test batch as global arrays, padded (with weight 0) to split evenly."""
        data = self.mesh.shape["data"]

        def place(x: np.ndarray) -> jax.Array:
            x = np.pad(x, [(0, -len(x) % data), *[(0, 0)] * (x.ndim - 1)])
            return jax.make_array_from_callback(x.shape, self._over_batch(0), lambda i: x[i])

        return jax.tree.map(place, batch)

    def _over_batch(self, axis: int) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, "data"))


def build(config: ConfigDict, task: Task) -> Program:
    """Jits the program of a run, which is to be run under `on(program.mesh)`.

    Raises:
      ValueError: if the config does not fit itself, the devices or the model.
    """
    for name in ("seeds", "steps", "batch_size", "log_every", "evaluate_every", "checkpoint_every"):
        if config[name] < 1:
            raise runs.RunError(f"config.{name} must be at least 1, got {config[name]}")
    mesh = make_mesh(config)
    create, step = _one_model(config, task)
    several = config.seeds > 1
    over_seeds: Callable[..., Any] = jax.vmap if several else lambda f, **_: f
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    with on(mesh):
        shardings = sharding.of(create, seed)
    _check_splits(jax.eval_shape(create, seed), shardings, config.mesh.model)
    # The logical names are those of one model; the axis of the seeds stays whole.
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, PartitionSpec(*[None] * several, *s.spec)), shardings
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    return Program(
        config, task, mesh, shardings,
        create=jax.jit(over_seeds(create), out_shardings=shardings),
        step=jax.jit(over_seeds(step), donate_argnums=0, out_shardings=(shardings, everywhere)),
        evaluate=jax.jit(over_seeds(task.evaluate, in_axes=(0, None)), out_shardings=everywhere),
    )  # fmt: skip


def _one_model(config: ConfigDict, task: Task) -> tuple[Callable[..., Any], Callable[..., Any]]:
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
        # Optax raises floats to integer powers, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            rate = jnp.asarray(schedule(state.step), jnp.float32)
        params = optax.apply_updates(state.params, updates)
        metrics |= {"loss": loss, "gradient_norm": optax.tree.norm(grads), "learning_rate": rate}
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    return create, step


def _check_splits(abstract: TrainState, shardings: TrainState, model: int) -> None:
    def check(path: Any, x: jax.ShapeDtypeStruct, s: NamedSharding) -> None:
        try:
            s.shard_shape(x.shape)
        except ValueError as error:
            raise runs.RunError(
                f"config.mesh.model={model} must divide what it splits, and "
                f"{jax.tree_util.keystr(path)} {x.shape} is split by {s.spec}; choose a divisor "
                f"of the number of heads (and key/value heads) and of mlp_dim"
            ) from error

    jax.tree_util.tree_map_with_path(check, abstract, shardings)
