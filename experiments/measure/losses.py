"""Train one seed by every kernel, and on every kind of mesh, and compare the losses.

    python -m experiments.measure losses                 # 100 steps of each
    python -m experiments.measure losses --devices=8     # and on meshes

(A CPU has 8 devices with XLA_FLAGS=--xla_force_host_platform_device_count=8.)

The run is that of configs/pydoc_lm.py, a language model on Python's documentation, with the same
initial parameters and batches for all. The table has the loss of the last step, and the largest
difference to the loss of `reference` on one device, in float32, over all steps. A difference grows
with the steps, as that of any two orders of sums does. The table and losses.png go to --workdir.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from experiments import tables
from experiments.measure import machine
from experiments.phases import Phase
from experiments.runs import command, folders
from flax_mha import sharding

FIRST = "reference, float32"
MESHES = {
    "rows over devices": {"data": -1},
    "rows and parameters over 2": {"data": -1, "fsdp": 2},
    "heads over 2": {"data": -1, "model": 2},
    "tokens over 2": {"data": -1, "context": 2},
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--steps", type=command.count, default=100)
    parser.add_argument("--devices", type=command.count, default=1, help="for meshes (default: 1)")
    parser.add_argument("--workdir", metavar="FOLDER")


def run(flags: argparse.Namespace) -> None:
    """Train way by way, and print, write and draw the losses."""
    folder = folders.result_folder(flags.workdir, f"losses-{sharding.platform()}")
    found: dict[str, np.ndarray] = {}
    lines = [tables.head("computed by", "last loss", "largest difference")]
    print(lines[0], flush=True)
    for name, kernel, dtype, mesh in ways(flags.devices):
        with Phase(f"training by {name}"):
            found[name] = train(kernel, dtype, mesh, flags)
        difference = np.abs(found[name] - found[FIRST]).max()
        lines.append(tables.line(name, f"{found[name][-1]:.5f}", f"{difference:.1e}"))
        print(lines[-1], flush=True)
    draw(folder / "losses.png", found)
    results = {name: losses.tolist() for name, losses in found.items()}
    print(tables.write(folder, "\n".join(lines), results))


def ways(devices: int) -> Iterator[tuple[str, str, str, dict[str, int]]]:
    """Yield the name, the kernel, the dtype and the mesh of each way, the reference's first."""
    kernels = ["reference", *(n for n in machine.kernels() if n != "reference")]
    for dtype in ("float32", "bfloat16"):
        for kernel in kernels:
            yield f"{kernel}, {dtype}", kernel, dtype, {}
    if devices > 1:
        for name, mesh in MESHES.items():
            yield name, "auto", "float32", mesh


def train(kernel: str, dtype: str, mesh: dict[str, int], flags: argparse.Namespace) -> np.ndarray:
    """Return the loss of each step."""
    # The other measurements do without these packages.
    from configs import pydoc_lm
    from experiments import tasks
    from experiments.trainer import loop

    config = pydoc_lm.get_config()
    config.update({"steps": flags.steps, "log_every": 1})
    config.evaluate_every = config.checkpoint_every = flags.steps
    config.model.update({"kernel": kernel, "dtype": dtype})
    config.data.stride = config.length
    config.mesh.update(mesh)
    devices = jax.devices()[: flags.devices if mesh else 1]
    program = loop.build(config, tasks.make(config), devices)
    with tempfile.TemporaryDirectory() as folder:
        rows = loop.train(program, Path(folder)).rows
    return np.array([row["loss"] for row in rows if row["split"] == "train"]).reshape(-1)


def draw(path: Path, found: dict[str, np.ndarray]) -> None:
    """Draw the losses of all ways, and their differences to the first."""
    from matplotlib.figure import Figure

    from experiments import plots

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    over, apart = figure.subplots(1, 2)
    for n, (name, losses) in enumerate(found.items()):
        style = {"linewidth": 1, "color": f"C{n}"}
        steps = 1 + np.arange(len(losses))
        over.plot(steps, losses, label=name, **style)
        if name != FIRST:
            apart.plot(steps, np.maximum(np.abs(losses - found[FIRST]), 1e-8), **style)
    over.set(xlabel="step", ylabel="training loss, nats per byte")
    apart.set(xlabel="step", ylabel=f"difference to {FIRST}", yscale="log")
    over.legend(frameon=False, fontsize=7)
    plots.save(figure, path, 110)
