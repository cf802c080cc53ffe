"""Compile the kernels for TPUs, and read the cycles of a tile from libtpu's schedules.

    python -m experiments.measure tiles --chip=v5e
    python -m experiments.measure tiles --chip=v4 --features=256 --blocks=256,512x256

Nothing runs, and no TPU is needed. libtpu schedules a kernel in bundles of instructions, one for
each cycle if nothing waits for memory. The table has, for each kernel and size of its tiles,

    tile     full or partial, or both if the kernel treats them alike
    bundles  of the part of the loop that computes a tile
    units    the cycles in which the matrix units can take a tile's rows, for v4, v5e and v5p
    spills   registers that a tile stores, because too few are left
    cycles   the larger of bundles and units, for 1,024 scores
    × 512²   the cycles relative to those of the same kernel with tiles of 512²

"all" adds up forward and backward. splash chooses its blocks itself, and has two kernels backward.
short has no tiles: its row is a head of at most 512 tokens, half of a step that computes two heads.
The constants in `flax_mha/kernels/chips/tpus.py` come from here.

The table, as table.md, and results.json go to --workdir (default: a new folder under runs/).
"""

import argparse
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import tables
from experiments.counts import schedule
from experiments.counts.schedule import TileCost
from experiments.measure import compiled
from experiments.measure.check import REFUSAL
from experiments.measure.programs import Chip
from experiments.phases import Phase
from experiments.runs import command, folders
from experiments.runs.failures import RunError
from flax_mha import dot_product_attention, kernels, masks
from flax_mha.base.shapes import Dims
from flax_mha.kernels.chips import tpus

# The rows of 128 features that a core's matrix units take in a cycle: four units of 128 × 128. The
# later chips have other units, whose rates are not published.
_ROWS = {"v4": 4, "v5e": 4, "v5p": 4}
MASKS = {"causal": masks.Causal(), "none": None}
HEAD = ("kernel", "block", "tile", "bundles", "units", "spills", "cycles", "× 512²")
HEADS = 2
Blocks = tuple[int, int]
_NAME = re.compile(
    r"flex_(?:forward|backward)|splash_[a-z]+_(?:fwd|dq|dkv)|short_(?:forward|backward)"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--chip", choices=[*compiled.TPUS], default="v5e")
    both = command.among(("flex", "splash", "short"))
    parser.add_argument("--kernels", type=both, default="flex,splash,short", metavar="NAME,…")
    parser.add_argument("--blocks", default="256,512,1024", metavar="SIZE,…",
                        help="queries and keys of flex's tiles, as 512 or 512x1024")  # fmt: skip
    parser.add_argument("--features", type=command.count, default=128, metavar="H")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--length", type=command.count, default=4096, metavar="T", help="tokens")
    parser.add_argument("--mask", choices=[*MASKS], default="causal")
    parser.add_argument("--workdir", metavar="FOLDER")


def run(flags: argparse.Namespace) -> None:
    """Compile kernel by kernel, and print and write the table."""
    blocks: list[Blocks] = []
    for text in flags.blocks.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?", text, re.ASCII)
        blocks.append((int(found[1]), int(found[2] or found[1])) if found else (0, 0))
        if not all(0 < n <= flags.length // 2 and n % 128 == 0 for n in blocks[-1]):
            raise RunError(
                f"--blocks must be sizes such as 512,512x1024, multiples of 128 and at most half "
                f"of --length={flags.length}, got {text!r}"
            )
    folder = folders.result_folder(flags.workdir, f"tiles-{flags.chip}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as dump:
        # libtpu reads its flags once, when JAX loads it.
        before = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = f"{before} {schedule.FLAGS.format(dump)}"
        chip = compiled.chip_of(flags.chip)
        # A program of the cache would have no schedule.
        jax.config.update("jax_enable_compilation_cache", False)
        for kernel in flags.kernels:
            for block in blocks if kernel == "flex" else [None]:
                with Phase(f"compiling {kernel} {_sizes(block) if block else ''}".rstrip()):
                    rows += measure(chip, Path(dump), kernel, block, flags)
    table = page(flags.chip, rows)
    print(f"{table}\n\n{tables.write(folder, table, {'flags': vars(flags), 'rows': rows})}")


def measure(
    chip: Chip, dump: Path, kernel: Any, block: Blocks | None, flags: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Compile a kernel's gradient, and yield the costs of its tiles, then their sums."""
    is_short = kernel == "short"
    length = min(flags.length, tpus.SHORT) if is_short else flags.length
    x = chip.array(1, length, HEADS, flags.features, dtype=jnp.dtype(flags.dtype))
    size = (length, length) if is_short else block or tpus.blocks(Dims.of(x, x, x))

    def loss(*qkv: jax.Array) -> jax.Array:
        out = dot_product_attention(*qkv, mask=MASKS[flags.mask])
        return (out.astype(jnp.float32) ** 2).sum()

    for path in dump.iterdir():
        path.unlink()  # an earlier kernel's
    q, k = block or (None, None)
    try:
        with jax.set_mesh(chip.mesh), kernels.use(kernel, block_q=q, block_k=k):
            jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        # A wrong --blocks is the caller's; short takes none, and refuses what a v4 has no room for.
        if isinstance(error, ValueError) and not is_short:
            raise RunError(str(error)) from error
        yield {"kernel": kernel, "block": size, "error": str(error)}
        return
    sums: dict[str, list[TileCost]] = {}
    for path in sorted(dump.glob("*[0-9]-final_bundles.txt")):
        if not (name := _NAME.search(path.name)):
            continue
        costs = schedule.tiles(path.read_text(errors="replace"))
        if is_short:  # one step for all heads
            costs = [TileCost(*(n // HEADS for n in cost)) for cost in costs]
        alone = ["full" if flags.mask == "none" else "both"]
        kinds = alone if len(costs) == 1 else ["full", "partial"]
        for kind, cost in zip(kinds, costs, strict=True):
            sums.setdefault(kind, []).append(cost)
            yield _row(name[0], size, kind, [cost], flags.chip)
    if not sums:
        raise RunError("libtpu wrote no schedules; run the command in a process of its own")
    for kind, added in sums.items():
        yield _row(f"{kernel}, all", size, kind, added, flags.chip)


def _row(
    kernel: str, size: Blocks, kind: str, costs: Sequence[TileCost], chip: str
) -> dict[str, Any]:
    total = TileCost(*map(sum, zip(*costs, strict=True)))
    cycles = sum(max(cost.bundles, cost.rows / _ROWS.get(chip, math.inf)) for cost in costs)
    return {"kernel": kernel, "block": size, "tile": kind, **total._asdict(), "cycles": cycles}


def page(chip: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = [tables.head(*HEAD)]
    usual = {
        (row["kernel"], row["tile"]): row["cycles"] / 512**2
        for row in rows if row["block"] == (512, 512) and "tile" in row
    }  # fmt: skip
    for row in rows:
        head = f"| `{row['kernel']}` | {_sizes(row['block'])} |"
        if "error" in row:
            status = "refused" if REFUSAL in row["error"] else "does not compile"
            lines.append(f"{head} {status} | | | | | |")
            continue
        score = row["cycles"] / (row["block"][0] * row["block"][1])
        units = f"{row['rows'] / _ROWS[chip]:,.0f}" if chip in _ROWS else ""
        ratio = usual.get((row["kernel"], row["tile"]))
        lines.append(
            f"{head} {row['tile']} | {row['bundles']:,} | {units} | {row['spills']:,} | "
            f"{1024 * score:.2f} | {f'{score / ratio:.3f}' if ratio else ''} |"
        )
    return "\n".join(lines)


def _sizes(block: Blocks) -> str:
    return f"{block[0]}²" if block[0] == block[1] else f"{block[0]} × {block[1]}"
