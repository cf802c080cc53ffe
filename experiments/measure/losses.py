"""Train one seed by every kernel, and on every kind of mesh, and compare the losses.

    python -m experiments.measure losses                 # 100 steps of each
    python -m experiments.measure losses --devices=8     # and on meshes

(A CPU has 8 devices with XLA_FLAGS=--xla_force_host_platform_device_count=8.)

The run is that of configs/pydoc_lm.py, a language model on Python's documentation, with the same
initial parameters and batches for all. The table has the loss of the last step, and the largest
difference to the loss of `reference` on one device, in float32, over all steps. Differences grow
with the steps, because training amplifies those between orders of sums. losses.png shows both.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import command
from experiments.measure import machine, results
from flax_mha import sharding

STEPS = 100
MESHES = {
    "rows over devices": {"data": -1},
    "rows and parameters over 2": {"data": -1, "fsdp": 2},
    "heads over 2": {"data": -1, "model": 2},
    "tokens over 2": {"data": -1, "context": 2},
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--devices", type=command.count, default=1, help="of the meshes (1: none)")


def run(flags: argparse.Namespace) -> None:
    """Train way by way, the reference's first."""
    columns = "computed by", "last loss", "largest difference"
    table = results.Table(flags.workdir, f"losses-{sharding.platform()}", *columns)
    kernels = dict.fromkeys(["reference", *machine.kernels()])
    ways: dict[str, Any] = {
        f"{kernel}, {dtype}": (kernel, dtype, {})
        for dtype in ("float32", "bfloat16") for kernel in kernels
    }  # fmt: skip
    if flags.devices > 1:
        ways |= {name: ("auto", "float32", mesh) for name, mesh in MESHES.items()}
    over: dict[str, Any] = {}
    apart: dict[str, Any] = {}
    steps, first = 1 + np.arange(STEPS), None
    for name, (kernel, dtype, mesh) in results.counted("training by", ways):
        losses = train(kernel, dtype, mesh, flags.devices if mesh else 1)
        first = losses if first is None else first
        difference = np.abs(losses - first)
        over[name] = steps, losses
        apart[name] = steps, np.where(difference > 0, difference, np.nan)
        table.add({"computed by": name, "losses": losses.tolist()},
                  name, f"{losses[-1]:.5f}", f"{difference.max():.1e}")  # fmt: skip
    panels = {"training loss, nats per byte": over, "difference to the first": apart}
    results.draw(table.folder / "losses.png", "step", panels, "-y")
    table.end()


def train(kernel: str, dtype: str, mesh: dict[str, int], count: int) -> np.ndarray:
    """Return the loss of each step."""
    # The other measurements do without these packages.
    from configs import pydoc_lm
    from experiments import tasks
    from experiments.trainer import loop

    config = pydoc_lm.get_config()
    config.update({"steps": STEPS, "log_every": 1})
    config.evaluate_every = config.checkpoint_every = STEPS
    config.model.update({"kernel": kernel, "dtype": dtype})
    config.data.stride = config.length
    config.mesh.update(mesh)
    program = loop.build(config, tasks.make(config), jax.devices()[:count])
    with tempfile.TemporaryDirectory() as folder:
        rows = loop.train(program, Path(folder)).rows
    return np.array([row["loss"] for row in rows if row["split"] == "train"]).reshape(-1)
