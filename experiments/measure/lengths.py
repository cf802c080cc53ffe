"""Count the memory and the bytes of a layer by its length, on a chip that need not be there.

    python -m experiments.measure lengths --chip=v5e
    python -m experiments.measure lengths --chip=h200    # needs the wheels of gpu-compile

A causal layer of 8 heads of 128 features computes the gradients of its parameters and its input,
for one row in bfloat16: by `auto`, by the other kernels of the chip, and by Flax's layer under its
mask array. Programs are compiled, not run. The table has the MiB that a program holds for a time,
beside its arguments and results, and the MiB that it moves. The table and lengths.png go to
--workdir.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import flax_mha
from experiments import tables
from experiments.measure import compiled, programs
from experiments.phases import Phase
from experiments.plan.compiled import TooLargeError
from experiments.runs import folders
from flax_mha import masks

D, N = 1024, 8
LENGTHS = (1024, 4096, 16384)
KERNELS = {"tpu": ("auto", "splash", "reference"), "gpu": ("auto", "blockwise", "reference")}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    compiled.add_chip(parser)
    parser.add_argument("--workdir", metavar="FOLDER")


def run(flags: argparse.Namespace) -> None:
    """Compile length by length, and print, write and draw the table."""
    folder = folders.result_folder(flags.workdir, f"lengths-{flags.chip}")
    chip = compiled.chip_of(flags.chip)
    names = [*KERNELS["gpu" if chip.is_gpu else "tpu"], "Flax"]
    columns = [f"{name}, {what}" for what in ("held", "moved") for name in names]
    lines, found = [tables.head("tokens", *columns)], dict[int, dict[str, compiled.Row | None]]()
    print(lines[0], flush=True)
    for T in LENGTHS:
        rows = {}
        for name in names:
            with Phase(f"compiling {T} tokens by {name}"):
                rows[name] = measure(chip, name, T)
        found[T] = rows
        ordered = [(rows[name], what) for what in ("held", "MiB") for name in names]
        cells = [f"{row[what]:,.0f}" if row else "too large" for row, what in ordered]
        lines.append(tables.line(f"{T:,}", *cells))
        print(lines[-1], flush=True)
    draw(folder / "lengths.png", flags.chip, names, found)
    print(tables.write(folder, "\n".join(lines), {str(T): rows for T, rows in found.items()}))


def measure(chip: programs.Chip, name: str, T: int) -> compiled.Row | None:
    """Return the costs of the gradient, or None if the program does not fit the chip."""
    x = chip.array(1, T, D)
    theirs = nn.MultiHeadDotProductAttention(
        N, dtype=programs.HALF, use_bias=False, force_fp32_for_softmax=True
    )
    weights = chip.place(jax.eval_shape(theirs.init, jax.random.key(0), x))
    kernel: Any = name
    ours = flax_mha.MultiHeadAttention(
        N, dtype=programs.HALF, use_bias=False, mask=masks.Causal(), kernel=kernel
    )

    def apply(weights: Any, x: jax.Array) -> Any:
        if name == "Flax":
            return theirs.apply(weights, x, mask=nn.make_causal_mask(x[..., 0]))
        return ours.apply(weights, x)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return (apply(weights, x).astype(jnp.float32) ** 2).mean()

    entry = programs.Entry("lengths", name, "gradient", jax.grad(loss, (0, 1)), (weights, x))
    try:
        return compiled.measure(chip, entry)
    except TooLargeError:
        return None


def draw(path: Any, chip: str, names: list[str], found: dict[int, dict[str, Any]]) -> None:
    """Draw the MiB that each way holds, and moves, by length, on one scale."""
    from matplotlib.figure import Figure

    from experiments import plots

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, what, title in zip(panels, ("held", "MiB"), ("held, MiB", "moved, MiB"), strict=True):
        for name in names:
            points = [(T, max(rows[name][what], 1)) for T, rows in found.items() if rows[name]]
            axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name, base=2)
        axes.set(xlabel="tokens", title=title)
    panels[0].legend(frameon=False)
    figure.suptitle(f"The gradient of a layer by length, compiled for {chip}, not run")
    plots.save(figure, path, 110)
