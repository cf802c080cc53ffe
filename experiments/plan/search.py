"""All ways to divide a run over devices, and what the better ones take."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from experiments import tasks
from experiments.plan import compiled, roofline
from experiments.plan.compiled import Compiled, TooLargeError
from experiments.plan.roofline import Times, network
from experiments.trainer import mesh
from experiments.trainer.optimizer import make_optimizer


class Layout(NamedTuple):
    """A way to divide a run, and what became of it.

    Attributes:
      sizes: of the mesh axes.
      found: what its step takes, if it was compiled.
      times: the least time of a step, where the chips are known.
      reason: why it was not compiled, or does not fit; empty if it fits.
    """

    sizes: dict[str, int]
    found: Compiled | None = None
    times: Times | None = None
    reason: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{axis}={n}" for axis, n in self.sizes.items() if n > 1) or "one device"


def plan(config: ConfigDict, devices: Sequence[jax.Device]) -> Layout:
    """What the layout of a config takes.

    Raises:
      ValueError: if the config does not fit itself, the devices or the model.
    """
    try:
        found = compiled.step(config, devices)
    except TooLargeError as error:
        sizes = dict(mesh.make_mesh(config, devices).shape)
        return Layout(sizes, reason=f"does not fit: {error}")
    links, peak, reason = network(found.devices), found.memory.peak, ""
    if links is not None and peak > links.memory:
        reason = f"does not fit: {TooLargeError(peak, links.memory)}"
    return Layout(found.sizes, found, roofline.times(found), reason)


def splits(count: int) -> Iterator[dict[str, int]]:
    """All sizes of the mesh axes whose product is count."""

    def divide(n: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: n}
            return
        for size in (k for k in range(1, n + 1) if n % k == 0):
            for rest in divide(n // size, axes[1:]):
                yield {axes[0]: size, **rest}

    return divide(count, mesh.AXES)


class Facts(NamedTuple):
    """What an estimate without compiling goes by.

    Attributes:
      numbers: of parameters.
      state: bytes of parameters and optimizer, whole.
      activation: bytes of what a layer hands to the next for the whole batch, in bfloat16.
      layers: how many.
    """

    numbers: int
    state: int
    activation: int
    layers: int

    @classmethod
    def of(cls, config: ConfigDict) -> "Facts":
        """Those of a run."""
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
        """About how many bytes a device sends: which layouts are worth compiling first.

        Parameters and gradients in bfloat16: those over fsdp are gathered twice and reduced once,
        those over data reduced once; four sums of activations a layer over model, and as many
        passes of keys and values over context.
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
) -> list[Layout]:
    """Compiles the layouts that may fit, the most promising first.

    Args:
      config: of the run; the sizes of its mesh do not matter.
      devices: to divide it over, all of them.
      most: how many to compile.
      tell: is called with each layout that was compiled.

    Returns:
      Those that fit, the fastest first where the chips are known; then all others with the reason.
    """
    facts = Facts.of(config)
    fits: list[Layout] = []
    others: list[Layout] = []
    links = network(devices)
    for sizes in sorted(splits(len(devices)), key=lambda sizes: facts.sent(**sizes)):
        least = facts.state / (sizes["fsdp"] * sizes["model"])
        if links is not None and least > links.memory:
            reason = f"parameters and optimizer alone take {least / 2**30:.1f} GiB"
            others.append(Layout(sizes, reason=reason))
            continue
        if most == 0:
            others.append(Layout(sizes, reason="left out; raise --most"))
            continue
        try:
            layout = plan(divided(config, sizes), devices)
        except ValueError as error:
            others.append(Layout(sizes, reason=f"refused: {error}"))
            continue
        most -= 1
        (others if layout.reason else fits).append(layout)
        tell(layout)
    fits.sort(key=lambda layout: layout.times.step if layout.times else math.inf)
    return fits + others


def divided(config: ConfigDict, sizes: dict[str, int]) -> ConfigDict:
    """The config on a mesh of those sizes."""
    config = config.copy_and_resolve_references()
    config.mesh.update(sizes)
    return config
