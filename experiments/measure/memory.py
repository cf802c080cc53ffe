"""Compile attention in float32 for a GPU that need not be there, and print its memory.

    python -m experiments.measure memory    # an H200, causal: the table of docs/how-kernels-work.md
    python -m experiments.measure memory --chip=a100 --mask=none

Each cell is the peak memory beside arguments and results. It needs the wheels of the extra
gpu-compile.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from experiments import tables
from experiments.measure import compiled
from experiments.measure.programs import Chip
from experiments.plan import gpus
from flax_mha import dot_product_attention, explain, masks
from flax_mha.kernels import Platform

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
HEADS = (16, 256)
# Beyond it XLA compiles plain einsums for minutes, because it computes their mask meanwhile.
LONGEST = 4096
H = 64
MASKS = {"none": None, "causal": masks.Causal()}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--chip", choices=sorted(gpus.TARGETS), default="h200")
    parser.add_argument("--mask", choices=sorted(MASKS), default="causal")


def run(flags: argparse.Namespace) -> None:
    """Print the table, line by line."""
    chip = compiled.chip_of(flags.chip)
    columns = [f"`{kernel}`, {passes}" for kernel in ("reference", "blockwise")
               for passes in ("forward", "with gradients")]  # fmt: skip
    print(tables.head("T = S", "B·N", "scores", *columns, "`auto`"))
    for T in LENGTHS:
        for N in HEADS:
            print(line(chip, T, N, MASKS[flags.mask]), flush=True)


def line(chip: Chip, T: int, N: int, mask: masks.Mask | None) -> str:
    """Return the line of one size."""
    x = jax.ShapeDtypeStruct((1, T, N, H), jnp.float32)
    platform = Platform("gpu", chip.device.device_kind, cudnn=(9, 20, 0))
    cells = [f"{T:,}", str(N), _mib(4 * N * T**2)]
    for kernel in ("reference", "blockwise"):
        for gradients in (False, True):
            tried = kernel == "blockwise" or T <= LONGEST
            cells.append(_mib(taken(chip, T, N, mask, kernel, gradients)) if tried else "")
    chosen = explain(x, x, x, mask=mask, platform=platform).chosen
    return tables.line(*cells, f"`{chosen}`")


def taken(chip: Chip, T: int, N: int, mask: masks.Mask | None, kernel: str, gradients: bool) -> int:
    """Return the bytes beside arguments and results, for N heads of 64 features."""
    x = chip.array(1, T, N, H, dtype=jnp.float32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out: jax.Array = dot_product_attention(q, k, v, mask=mask, kernel=kernel)
        return out

    def loss(*qkv: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attend(*qkv)))

    with jax.set_mesh(chip.mesh):
        call = jax.jit(jax.grad(loss, (0, 1, 2)) if gradients else attend)
        stats: Any = call.lower(x, x, x).compile().memory_analysis()
    return int(stats.temp_size_in_bytes)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"
