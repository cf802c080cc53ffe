"""The step of a deep model without a loop over its layers, from the steps of two shallow ones.

Without `config.model.scan`, a program has the instructions of each layer, and takes longer to
compile with more layers. The costs grow by the same amount with each, so two depths give them.
"""

from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments import tasks
from experiments.plan import compiled
from experiments.plan.collectives import Collective
from experiments.plan.compiled import Compiled, Memory, TooLargeError
from experiments.runs.checks import shard_bytes
from experiments.trainer import loop

DEPTHS = (4, 8)


def step(config: ConfigDict, devices: Sequence[jax.Device], whole: bool = False) -> Compiled:
    """Compile the step of a run, or extrapolate it from two depths, and return its costs.

    Parameters and optimizer are exact. A model with at most twice the layers of the deeper compiled
    one, or with a loop over its layers, is compiled whole.

    Args:
      config: the run's config.
      devices: the devices, as in `compiled.step`.
      whole: True to compile all layers of any model.

    Raises:
      TooLargeError: if the step does not fit a device's memory.
    """
    layers = config.model.get("num_layers", 0)
    if whole or layers <= 2 * DEPTHS[1] or config.model.get("scan", False):
        return compiled.step(config, devices)
    costs: list[Compiled | TooLargeError] = []
    for depth in DEPTHS:
        shallow = config.copy_and_resolve_references()
        shallow.model.num_layers = depth
        try:
            costs.append(compiled.step(shallow, devices))
        except TooLargeError as error:
            costs.append(error)
    low, high = costs
    if isinstance(low, Compiled) and isinstance(high, Compiled):
        return _extend(low, high, config, devices)
    needs = [x.memory.peak if isinstance(x, Compiled) else x.needs for x in costs]
    has = next(x.has for x in costs if isinstance(x, TooLargeError))
    raise TooLargeError(_line(needs[0], needs[1], layers), has)


def _extend(
    low: Compiled, high: Compiled, config: ConfigDict, devices: Sequence[jax.Device]
) -> Compiled:
    layers = config.model.num_layers

    def line(a: float, b: float) -> int:
        return max(0, round(_line(a, b, layers)))

    state = loop.build(config, tasks.make(config), devices).abstract_state()
    parameters, optimizer = map(shard_bytes, (state.params, state.opt_state))
    batch, activations, peak = map(line, low.memory[2:], high.memory[2:])
    return high._replace(
        memory=Memory(parameters, optimizer, batch, activations, peak),
        flops=line(low.flops, high.flops), moved=line(low.moved, high.moved),
        sent=_extend_sent(low.sent, high.sent, layers),
        seconds=low.seconds + high.seconds, depths=DEPTHS,
    )  # fmt: skip


def _extend_sent(
    low: Sequence[Collective], high: Sequence[Collective], layers: int
) -> list[Collective]:
    """Extrapolate runs and bytes for each kind and groups: XLA joins the collectives of layers."""
    totals: dict[tuple[str, bytes], np.ndarray] = {}
    example: dict[tuple[str, bytes], Collective] = {}
    for at, found in enumerate((low, high)):
        for one in found:
            key = one.kind, one.groups.tobytes()
            example[key] = one
            sums = totals.setdefault(key, np.zeros((2, 2)))
            sums[at] += one.times, one.times * one.bytes
    extended = []
    for key, (first, second) in totals.items():
        times, size = (max(0.0, _line(a, b, layers)) for a, b in zip(first, second, strict=True))
        if size:
            count = max(1, round(times))
            extended.append(example[key]._replace(times=count, bytes=round(size / count)))
    return extended


def _line(low: float, high: float, layers: int) -> float:
    first, second = DEPTHS
    return low + (high - low) * (layers - first) / (second - first)
