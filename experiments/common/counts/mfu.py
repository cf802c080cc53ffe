"""The share of the devices' peak that a training step uses (model FLOPs utilization)."""

from collections import Counter
from typing import Any

import jax

from experiments.common.counts import work
from experiments.common.counts.chips import CHIPS, GPUS
from experiments.common.counts.hlo import Module


def peak(program: Any) -> float:
    """Return the peak of a device of the mesh in operations a second; 0 for unknown, as of CPUs."""
    devices = list(program.mesh.devices.flat)
    chip = CHIPS.get(devices[0].device_kind) or GPUS.get(devices[0].device_kind)
    if chip is None:
        return 0.0
    # Devices with the same coordinates are the cores of one chip.
    places = Counter(tuple(getattr(device, "coords", None) or (device.id,)) for device in devices)
    return chip.flops / max(places.values())


def flops(program: Any, state: Any, batch: Any) -> int:
    """Return the operations of matmuls that a training step needs, on one device.

    These are three times the operations of the loss, because each matmul has two in the backward
    pass. Recomputation, by `remat` or within a kernel, is left out. Their share of the peak is MFU.

    Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    loss = program.task.loss
    loss = jax.vmap(loss) if program.config.seeds > 1 else loss
    traced = jax.jit(loss).trace(state.params, batch, state.key)
    text = traced.lower().compile().as_text()
    return 3 * (work.flops(Module(text)) + work.pallas_flops(traced.jaxpr.jaxpr))
