"""Time the programs of `compiled` on the device that is here.

    python -m experiments.measure timed
    python -m experiments.measure timed --programs=arrays,decode --seconds=4

The contestants of a program run in turns, with random parameters and inputs. The table has, for
each program and contestant,

    ms       of a run, the median of the rounds, and the middle half of them
    × best   the ratio to the fastest contestant
    compile  seconds to trace and to compile

The tokens of a step are the last that fit in the cache. The table, as table.md, and results.json
go to --workdir (default: a new folder under runs/).
"""

import argparse
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments import tables
from experiments.measure import programs
from experiments.measure.programs import Chip, Entry
from experiments.measure.timing import Timing, Work, attempt, interleave
from experiments.phases import Phase
from experiments.runs import command, folders
from flax_mha import sharding

Row = dict[str, Any]
HEAD = tables.head("program", "pass", "", "ms", "middle half", "× best", "compile")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    programs.add_names(parser)
    parser.add_argument("--seconds", type=command.seconds, default=2.0, help="of a program")
    parser.add_argument("--total", type=command.seconds, default=600.0, help="the time limit")
    parser.add_argument("--workdir", metavar="FOLDER")


def run(flags: argparse.Namespace) -> None:
    """Time the programs one by one, and print and write the table."""
    platform = sharding.platform()
    folder = folders.result_folder(flags.workdir, f"timed-{platform}")
    chip = Chip(jax.devices()[0], platform == "gpu")
    end = time.perf_counter() + flags.total
    rows: list[Row] = []
    table, place = HEAD, "no time was left"
    print(HEAD, flush=True)
    for program, passes, contestants in races(chip, flags.programs):
        if time.perf_counter() > end:
            break
        with Phase(f"timing {program}, {passes}"), jax.set_mesh(chip.mesh):
            found = [{"program": program, "passes": passes} | row
                     for row in race(contestants, flags.seconds)]  # fmt: skip
        rows += found
        print("\n".join(map(line, found)), flush=True)
        results = {"device": chip.device.device_kind, "jax": jax.__version__, "rows": rows}
        table = "\n".join([chip.device.device_kind, "", HEAD, *map(line, rows)])
        place = tables.write(folder, table, results)
    print(f"\n{table}\n\n{place}")


def races(chip: Chip, names: Sequence[str]) -> Iterator[tuple[str, str, list[Entry]]]:
    """Yield each program and pass with its contestants."""
    for name in names:
        listed = list(programs.entries(chip, [name]))
        for passes in dict.fromkeys(entry.passes for entry in listed):
            yield name, passes, [entry for entry in listed if entry.passes == passes]


def race(contestants: Sequence[Entry], seconds: float) -> list[Row]:
    """Return the times of the contestants of a program."""
    works, compiled = {}, {}
    for entry in contestants:
        start = time.perf_counter()
        works[entry.contestant] = attempt(functools.partial(work, entry))
        compiled[entry.contestant] = time.perf_counter() - start
    found = interleave(works, 200, seconds)
    best = min((x.median for x in found.values() if isinstance(x, Timing)), default=0.0)
    rows = []
    for name in compiled:
        row: Row = {"contestant": name, "compile": compiled[name]}
        timing = found[name]
        if isinstance(timing, Timing):
            row |= {"milliseconds": [1000 * x for x in timing[:3]], "ratio": timing.median / best}
        else:
            row["reason"] = timing.reason
        rows.append(row)
    return rows


def work(entry: Entry) -> Work:
    """Return a program, compiled, with its arguments."""
    arguments = filled(entry)
    kept = [x for i, x in enumerate(arguments) if i not in entry.donated]
    # Only arrays that the result replaces are donated: positions stay as they are.
    given, tree = jax.tree.flatten([arguments[i] for i in entry.donated])
    moves = [jnp.issubdtype(x.dtype, jnp.inexact) for x in given]

    def call(moving: list[Any], still: list[Any], kept: list[Any]) -> Any:
        sources = {True: iter(moving), False: iter(still)}
        donated = iter(jax.tree.unflatten(tree, [next(sources[move]) for move in moves]))
        rest = iter(kept)
        result = entry.function(*(
            next(donated if i in entry.donated else rest) for i in range(len(arguments))
        ))  # fmt: skip
        if not given:
            return result, []
        out, new = result
        return out, [x for x, move in zip(jax.tree.leaves(new), moves, strict=True) if move]

    moving = [x for x, move in zip(given, moves, strict=True) if move]
    still = [x for x, move in zip(given, moves, strict=True) if not move]
    function = jax.jit(call, donate_argnums=0).lower(moving, still, kept).compile()
    state = [moving]

    def step() -> Any:
        out, state[0] = function(state[0], still, kept)
        return out

    return Work(step, jax.block_until_ready)


def filled(entry: Entry) -> list[Any]:
    """Return random arguments, on the device.

    Integers of a cache are the position from which the tokens fill it. Others are tokens, and the
    last eighth of a sequence is padding.
    """
    slots = max(
        (x.shape[-2] for i in entry.donated for x in jax.tree.leaves(entry.arguments[i])
         if x.ndim > 2), default=1,
    )  # fmt: skip
    leaves, tree = jax.tree.flatten(entry.arguments)
    donated = jax.tree.leaves(
        [jax.tree.map(lambda x, i=i: i in entry.donated, x) for i, x in enumerate(entry.arguments)]
    )

    def fill(key: jax.Array, x: Any, donated: bool) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return (0.05 * jax.random.normal(key, x.shape, jnp.bfloat16)).astype(x.dtype)
        if donated:
            return jnp.full(x.shape, slots - entry.arguments[-1].shape[1], x.dtype)
        made = jax.random.randint(key, x.shape, 1, 1000, x.dtype)
        return made.at[..., -(x.shape[-1] // 8) :].set(0)

    @functools.partial(jax.jit, out_shardings=[x.sharding for x in leaves])
    def make() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(leaves))
        return [fill(*one) for one in zip(keys, leaves, donated, strict=True)]

    return list(jax.tree.unflatten(tree, make()))


def line(row: Row) -> str:
    """Return a row's line of the table in Markdown."""
    cells = [f"`{row['program']}`", row["passes"], row["contestant"]]
    if "reason" in row:
        cells += [f"failed: {row['reason'][:200]}", "", ""]
    else:
        median, q1, q3 = row["milliseconds"]
        cells += [f"{median:.3f}", f"{q1:.3f}–{q3:.3f}", f"{row['ratio']:.2f}"]
    return tables.line(*cells, f"{row['compile']:.1f} s")
