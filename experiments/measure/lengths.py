"""Count the memory and the bytes of a layer by its length, on a chip that need not be there.

    python -m experiments.measure lengths --chip=v5e
    python -m experiments.measure lengths --chip=h200    # needs the wheels of gpu-compile

A causal layer of 8 heads of 128 features computes the gradients of its parameters and its input,
for one row in bfloat16: by `auto`, by other kernels of the chip, and by Flax's layer under its mask
array. Programs are compiled, not run. The table has the MiB that a program holds for a time,
besides its arguments and results, and the MiB that it moves. lengths.png shows both.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax

import flax_mha
from experiments.measure import compiled, programs, results
from experiments.measure.results import Table
from experiments.plan.compiled import TooLargeError
from flax_mha import masks

D, N = 1024, 8
LENGTHS = (1024, 4096, 16384)
KERNELS = {"tpu": ("auto", "splash", "reference"), "gpu": ("auto", "blockwise", "reference")}
PANELS = {"held": "held", "MiB": "moved"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    compiled.add_chip(parser)


def run(flags: argparse.Namespace) -> None:
    """Compile length by length."""
    chip = compiled.chip_of(flags.chip)
    names = [*KERNELS["gpu" if chip.is_gpu else "tpu"], "Flax"]
    columns = [f"{name}, {what}" for what in PANELS.values() for name in names]
    table = Table(flags.workdir, f"lengths-{flags.chip}", "tokens", *columns, chip=flags.chip)
    found: dict[int, dict[str, Any]] = {}
    for _, T in results.counted("compiling", {f"{T:,} tokens": T for T in LENGTHS}):
        found[T] = rows = {name: measure(chip, name, T) for name in names}
        sizes = [row and row[key] for key in PANELS for row in rows.values()]
        cells = ["too large" if size is None else f"{size:,.0f}" for size in sizes]
        table.add({"tokens": T, **rows}, f"{T:,}", *cells)
    fits = {name: {T: rows[name] for T, rows in found.items() if rows[name]} for name in names}
    panels = {
        f"{what}, MiB": {
            name: ([*rows], [max(row[key], 1) for row in rows.values()])
            for name, rows in fits.items()
        }
        for key, what in PANELS.items()
    }
    results.draw(table.folder / "lengths.png", "tokens", panels, "xx", sharey=True)
    table.end()


def measure(chip: programs.Chip, name: str, T: int) -> compiled.Row | None:
    """Return the costs of the gradient, or None if the program does not fit the chip."""
    x = chip.array(1, T, D)
    options: dict[str, Any] = {"dtype": programs.HALF, "use_bias": False}
    if name == "Flax":
        layer: Any = nn.MultiHeadDotProductAttention(N, force_fp32_for_softmax=True, **options)

        def apply(weights: Any, x: jax.Array) -> Any:
            return layer.apply(weights, x, mask=nn.make_causal_mask(x[..., 0]))
    else:
        options |= {"mask": masks.Causal(), "kernel": name}
        layer = flax_mha.MultiHeadAttention(N, **options)
        apply = layer.apply
    weights = chip.initial(layer, x)
    gradient = jax.grad(programs.loss(apply), (0, 1))
    try:
        entry = programs.Entry("lengths", name, "gradient", gradient, (weights, x))
        return compiled.measure(chip, entry)
    except TooLargeError:
        return None
