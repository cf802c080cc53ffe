"""Layouts of a run over devices: a given one, the best of all, or changes that make it fit."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from experiments import tasks
from experiments.plan import compiled, roofline
from experiments.plan.compiled import Compiled, TooLargeError
from experiments.plan.roofline import Times
from experiments.trainer import mesh
from experiments.trainer.optimizer import make_optimizer

# Names of activations that a block stores, from less recomputation to less memory.
POLICIES = ("q,k,v,z,lse,mlp_pre", "z,lse", True)
Changes = dict[str, Any]  # values of a config by key


class Layout(NamedTuple):
    """A layout of a run, and its costs."""

    sizes: dict[str, int]  # of the mesh axes
    found: Compiled | None = None
    times: Times | None = None  # None if the chips are unknown
    reason: str = ""  # why it was not compiled or does not fit
    needs: float | None = None  # bytes on one device, if known
    has: float | None = None  # bytes of a device's memory, if known
    flags: tuple[str, ...] = ()  # of the command, for changes that make it fit

    def __str__(self) -> str:
        flags = [flag.removeprefix("--config.") for flag in self.flags if ".mesh." not in flag]
        return ", ".join([compiled.name(self.sizes), *flags])


def plan(config: ConfigDict, devices: Sequence[jax.Device]) -> Layout:
    """Compile the layout of a config, and return its costs."""
    links = roofline.network(devices)
    has = links.chip.memory / links.cores if links else None
    try:
        found = compiled.step(config, devices)
    except TooLargeError as error:
        sizes = dict(mesh.make_mesh(config, devices).shape)
        return Layout(sizes, reason=f"does not fit: {error}", needs=error.needs, has=error.has)
    peak, reason = found.memory.peak, ""
    if has is not None and peak > has:
        reason = f"does not fit: {TooLargeError(peak, has)}"
    return Layout(found.sizes, found, roofline.times(found), reason, peak, has)


def splits(count: int) -> list[dict[str, int]]:
    """Return all sizes of the mesh axes with this product."""
    factors = [n for n in range(1, count + 1) if count % n == 0]
    sizes = itertools.product(factors, repeat=len(mesh.AXES))
    return [dict(zip(mesh.AXES, x, strict=True)) for x in sizes if math.prod(x) == count]


class Facts(NamedTuple):
    """The inputs of an estimate without compiling."""

    parameters: int  # their number
    state: int  # bytes of all parameters and the optimizer state
    activations: int  # bytes of the outputs of all layers for the whole batch, in bfloat16

    @classmethod
    def of(cls, config: ConfigDict) -> "Facts":
        """Return the facts of a run."""
        params = jax.eval_shape(tasks.make(config).init, jax.random.key(0))
        state = params, jax.eval_shape(make_optimizer(config)[0].init, params)
        tokens = config.batch_size * config.get("length", 1)
        return cls(
            sum(x.size for x in jax.tree.leaves(params)),
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
            2 * tokens * config.model.features * config.model.num_layers,
        )

    def sent(self, data: int, fsdp: int, model: int, context: int) -> float:
        """Estimate the bytes that a device sends, to choose the layouts to compile first.

        Parameters and gradients count in bfloat16. Over fsdp, they are gathered twice and reduced
        once; over data, reduced once. Each layer needs four sums of activations over model, and as
        many passes of keys and values over context.
        """
        weights, here = 2 * self.parameters / model, self.activations / (data * fsdp)
        return (
            4 * weights * (1 - 1 / fsdp) + 2 * weights / fsdp * (1 - 1 / data)
            + 8 * here / context * (1 - 1 / model) + 6 * here / model * (1 - 1 / context)
        )  # fmt: skip


def search(config: ConfigDict, devices: Sequence[jax.Device], most: int) -> list[Layout]:
    """Compile the layouts over all devices that may fit, the most promising first.

    It returns the layouts that fit, the fastest first if the chips are known, then all others with
    the reason. At most so many are compiled. The sizes of the config's mesh do not matter.
    """
    facts, links = Facts.of(config), roofline.network(devices)
    fits: list[Layout] = []
    others: list[Layout] = []
    count = len(devices) // mesh.count_slices(devices)
    for sizes in sorted(splits(count), key=lambda sizes: facts.sent(**sizes)):
        least = facts.state / (sizes["fsdp"] * sizes["model"])
        if links is not None and least > links.chip.memory / links.cores:
            reason = f"parameters and optimizer alone take {least / 2**30:.1f} GiB"
            layout = Layout(sizes, reason=reason)
        elif most == 0:
            layout = Layout(sizes, reason="left out; raise --most")
        else:
            changes = {f"mesh.{axis}": n for axis, n in sizes.items()}
            try:
                layout = plan(changed(config, changes), devices)
                most -= 1
            except ValueError as error:
                layout = Layout(sizes, reason=f"refused: {error}")
        (others if layout.reason else fits).append(layout)
    fits.sort(key=lambda layout: layout.times.step if layout.times else math.inf)
    return fits + others


def remedies(config: ConfigDict, devices: Sequence[jax.Device], tight: Layout) -> list[Layout]:
    """Compile changes of a layout that does not fit, in order of their cost, until one fits.

    Each layout has the changes of those before it, too. docs/scaling.md lists the changes.
    """
    found: list[Layout] = []
    total: Changes = {f"mesh.{axis}": tight.sizes[axis] for axis in mesh.AXES}
    total["mesh.context"] *= tight.sizes.get("ulysses", 1)
    config = changed(config, total)
    for changes in _steps(config):
        total = total | changes
        try:
            layout = plan(changed(config, total), devices)
        except ValueError:
            continue  # The model or the mesh refuses it.
        layout = layout._replace(flags=tuple(f"--config.{key}={x}" for key, x in total.items()))
        saved = 1 - (layout.needs or 0) / ((found or [tight])[-1].needs or 1)
        found.append(layout)
        if not layout.reason or ("batch_size" in changes and saved < 0.01):
            break  # If fewer rows bring nothing, it is the state that does not fit.
    return found


def _steps(config: ConfigDict) -> Iterator[Changes]:
    """Yield changes that take less memory, the cheapest first, each on top of those before it."""
    m, rows, averaged = config.mesh, config.batch_size, config.optimizer.accumulate
    data, fsdp = m.data, m.fsdp
    if data > 1:
        data, fsdp = 1, data * fsdp
        yield {"mesh.data": 1, "mesh.fsdp": fsdp}
    remat = config.model.get("remat", True)
    if remat is not True:
        later = POLICIES[POLICIES.index(remat) + 1 :] if remat in POLICIES else POLICIES
        yield from ({"model.remat": policy} for policy in later)
    if "length" in config and fsdp % 2 == 0 and config.length % (2 * m.context) == 0:
        fsdp, rows, averaged = fsdp // 2, rows // 2, 2 * averaged
        yield {
            "mesh.fsdp": fsdp, "mesh.context": 2 * m.context, "batch_size": rows,
            "optimizer.accumulate": averaged,
        }  # fmt: skip
    while rows % (2 * data * fsdp) == 0:
        rows, averaged = rows // 2, 2 * averaged
        yield {"batch_size": rows, "optimizer.accumulate": averaged}


def changed(config: ConfigDict, changes: Changes) -> ConfigDict:
    """Return a copy of a config with these values."""
    config = config.copy_and_resolve_references()
    with config.ignore_type():  # `model.remat` is a bool or names.
        config.update_from_flattened_dict(changes)
    return config
