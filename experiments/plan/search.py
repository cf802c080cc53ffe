"""Layouts of a run over devices: a given one, or the best of all."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from experiments import tasks
from experiments.common.devices import AXES, count_slices, make_mesh
from experiments.plan import compiled, roofline
from experiments.plan.compiled import Compiled, TooLargeError
from experiments.plan.roofline import Times
from experiments.trainer.optimizer import make_optimizer


class Layout(NamedTuple):
    """A layout of a run, and its costs."""

    sizes: dict[str, int]  # of the mesh axes
    found: Compiled | None = None
    times: Times | None = None  # None if the chips are unknown
    reason: str = ""  # why it was not compiled or does not fit
    needs: float | None = None  # bytes on one device, if known
    has: float | None = None  # bytes of a device's memory, if known

    def __str__(self) -> str:
        return compiled.name(self.sizes)


def plan(config: ConfigDict, devices: Sequence[jax.Device]) -> Layout:
    """Compile the layout of a config, and return its costs."""
    links = roofline.network(devices)
    has = links.chip.memory / links.cores if links else None
    try:
        found = compiled.step(config, devices)
    except TooLargeError as error:
        sizes = dict(make_mesh(config, devices).shape)
        return Layout(sizes, reason=f"does not fit: {error}", needs=error.needs, has=error.has)
    peak, reason = found.memory.peak, ""
    if has is not None and peak > has:
        reason = f"does not fit: {TooLargeError(peak, has)}"
    return Layout(found.sizes, found, roofline.times(found), reason, peak, has)


def splits(count: int) -> list[dict[str, int]]:
    """Return all sizes of the mesh axes with this product."""
    factors = [n for n in range(1, count + 1) if count % n == 0]
    sizes = itertools.product(factors, repeat=len(AXES))
    return [dict(zip(AXES, x, strict=True)) for x in sizes if math.prod(x) == count]


def sent(sizes: dict[str, int], parameters: int, activations: int) -> float:
    """Estimate the bytes that a device sends, to choose the layouts to compile first.

    Parameters and gradients count in bfloat16. Over fsdp, they are gathered twice and reduced once;
    over data, reduced once. Each layer needs four sums of activations over model, and as many
    passes of keys and values over context.

    Args:
      sizes: the sizes of the mesh axes.
      parameters: the number of parameters.
      activations: the bytes of the outputs of all layers for the whole batch.
    """
    data, fsdp, model, context = (sizes[axis] for axis in AXES)
    weights, here = 2 * parameters / model, activations / (data * fsdp)
    return (
        4 * weights * (1 - 1 / fsdp) + 2 * weights / fsdp * (1 - 1 / data)
        + 8 * here / context * (1 - 1 / model) + 6 * here / model * (1 - 1 / context)
    )  # fmt: skip


def search(config: ConfigDict, devices: Sequence[jax.Device], most: int) -> list[Layout]:
    """Compile the layouts over all devices that may fit, the most promising first.

    It returns the layouts that fit, the fastest first if the chips are known, then all others with
    the reason. At most so many are compiled. The sizes of the config's mesh do not matter.
    """
    links = roofline.network(devices)
    params = jax.eval_shape(tasks.make(config).init, jax.random.key(0))
    state = params, jax.eval_shape(make_optimizer(config)[0].init, params)
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    parameters = sum(x.size for x in jax.tree.leaves(params))
    tokens = config.batch_size * config.get("length", 1)
    activations = 2 * tokens * config.model.features * config.model.num_layers
    fits, others = list[Layout](), list[Layout]()
    count = len(devices) // count_slices(devices)
    for sizes in sorted(splits(count), key=lambda sizes: sent(sizes, parameters, activations)):
        least = state_bytes / (sizes["fsdp"] * sizes["model"])
        if links is not None and least > links.chip.memory / links.cores:
            reason = f"parameters and optimizer alone take {least / 2**30:.1f} GiB"
            layout = Layout(sizes, reason=reason)
        elif most == 0:
            layout = Layout(sizes, reason="left out; raise --most")
        else:
            split = config.copy_and_resolve_references()
            split.mesh.update(sizes)
            try:
                layout = plan(split, devices)
                most -= 1
            except ValueError as error:
                layout = Layout(sizes, reason=f"refused: {error}")
        (others if layout.reason else fits).append(layout)
    fits.sort(key=lambda layout: layout.times.step if layout.times else math.inf)
    return fits + others
