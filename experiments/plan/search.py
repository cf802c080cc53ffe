"""All layouts of a run over devices, and the costs of the better ones."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from experiments import tasks
from experiments.plan import depth, roofline
from experiments.plan.compiled import Compiled, TooLargeError
from experiments.plan.roofline import Times, network
from experiments.trainer import mesh
from experiments.trainer.mesh import count_slices
from experiments.trainer.optimizer import make_optimizer


class Layout(NamedTuple):
    """A layout of a run, and its costs.

    Attributes:
      sizes: the sizes of the mesh axes.
      found: the compiled step, or None if it was not compiled.
      times: the minimum time of a step, or None if the chips are unknown.
      reason: why it was not compiled or does not fit; empty if it fits.
      needs: the bytes on one device, if it was compiled.
      has: the bytes of a device's memory, if known.
    """

    sizes: dict[str, int]
    found: Compiled | None = None
    times: Times | None = None
    reason: str = ""
    needs: float | None = None
    has: float | None = None

    def __str__(self) -> str:
        return ", ".join(f"{axis}={n}" for axis, n in self.sizes.items() if n > 1) or "one device"


def plan(config: ConfigDict, devices: Sequence[jax.Device], whole: bool = False) -> Layout:
    """Compile the layout of a config, all layers of it if `whole`, and return its costs."""
    try:
        found = depth.step(config, devices, whole)
    except TooLargeError as error:
        sizes = dict(mesh.make_mesh(config, devices).shape)
        return Layout(sizes, reason=f"does not fit: {error}", needs=error.needs, has=error.has)
    links, peak, reason = network(found.devices), found.memory.peak, ""
    if links is not None and peak > links.memory:
        reason = f"does not fit: {TooLargeError(peak, links.memory)}"
    has = links.memory if links else None
    return Layout(found.sizes, found, roofline.times(found), reason, peak, has)


def splits(count: int) -> Iterator[dict[str, int]]:
    """Return all sizes of the mesh axes with this product."""

    def divide(n: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: n}
            return
        for size in (k for k in range(1, n + 1) if n % k == 0):
            for rest in divide(n // size, axes[1:]):
                yield {axes[0]: size, **rest}

    return divide(count, mesh.AXES)


class Facts(NamedTuple):
    """The inputs of an estimate without compiling.

    Attributes:
      numbers: the number of parameters.
      state: the bytes of all parameters and the optimizer state.
      activation: the bytes of a layer's output for the whole batch, in bfloat16.
      layers: the number of layers.
    """

    numbers: int
    state: int
    activation: int
    layers: int

    @classmethod
    def of(cls, config: ConfigDict) -> "Facts":
        """Return the facts of a run."""
        task = tasks.make(config)
        params = jax.eval_shape(lambda: task.init(jax.random.key(0)))
        optimizer, _ = make_optimizer(config)
        held = jax.tree.leaves((params, jax.eval_shape(optimizer.init, params)))
        tokens = config.batch_size * config.get("length", 1)
        return cls(
            sum(x.size for x in jax.tree.leaves(params)),
            sum(x.size * x.dtype.itemsize for x in held),
            2 * tokens * config.model.features, config.model.num_layers,
        )  # fmt: skip

    def sent(self, data: int, fsdp: int, model: int, context: int) -> float:
        """Estimate the bytes that a device sends, to choose the layouts to compile first.

        Parameters and gradients count in bfloat16. Over fsdp, they are gathered twice and reduced
        once; over data, reduced once. Each layer needs four sums of activations over model, and as
        many passes of keys and values over context.
        """
        weights = 2 * self.numbers / model
        here = self.layers * self.activation / (data * fsdp)
        return (
            4 * weights * (1 - 1 / fsdp) + 2 * weights / fsdp * (1 - 1 / data)
            + 8 * here / context * (1 - 1 / model) + 6 * here / model * (1 - 1 / context)
        )  # fmt: skip


def search(
    config: ConfigDict,
    devices: Sequence[jax.Device],
    most: int,
    tell: Callable[[Layout], None] = lambda layout: None,
    whole: bool = False,
) -> list[Layout]:
    """Compile the layouts that may fit, the most promising first.

    Args:
      config: the run's config; the sizes of its mesh do not matter.
      devices: the devices; every layout uses all of them.
      most: the number of layouts to compile.
      tell: a function that is called with each compiled layout.
      whole: True to compile all layers of any model, see `depth.step`.

    Returns:
      The layouts that fit, the fastest first if the chips are known, then all others with the
      reason.
    """
    facts = Facts.of(config)
    fits: list[Layout] = []
    others: list[Layout] = []
    links = network(devices)
    count = len(devices) // count_slices(devices)
    for sizes in sorted(splits(count), key=lambda sizes: facts.sent(**sizes)):
        least = facts.state / (sizes["fsdp"] * sizes["model"])
        if links is not None and least > links.memory:
            reason = f"parameters and optimizer alone take {least / 2**30:.1f} GiB"
            others.append(Layout(sizes, reason=reason))
            continue
        if most == 0:
            others.append(Layout(sizes, reason="left out; raise --most"))
            continue
        try:
            layout = plan(divided(config, sizes), devices, whole)
        except ValueError as error:
            others.append(Layout(sizes, reason=f"refused: {error}"))
            continue
        most -= 1
        (others if layout.reason else fits).append(layout)
        tell(layout)
    fits.sort(key=lambda layout: layout.times.step if layout.times else math.inf)
    return fits + others


def divided(config: ConfigDict, sizes: dict[str, int]) -> ConfigDict:
    """Return the config with a mesh of these sizes."""
    config = config.copy_and_resolve_references()
    config.mesh.update(sizes)
    return config
