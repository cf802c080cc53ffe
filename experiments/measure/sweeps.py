"""Time the removal of each head of a model by one program, and measure the memory of edits.

    python -m experiments.measure sweeps    # four minutes: the tables of docs/look-inside.md

144 heads are removed one by one from an encoder of 12 layers with 12 heads. `sweep` is compared
with a loop of one jitted function, in turns, and with 144 times the compilation of one program.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from experiments import tables
from experiments.measure.timing import Work, interleave
from experiments.runs import command
from flax_mha import Encoder, EncoderBlock, MultiHeadAttention, edits, masks
from flax_mha.edits import Edit

LAYERS = HEADS = 12
# Tokens and features of one example.
SIZES = ((16, 48), (64, 96), (128, 192), (256, 384))
BATCHES = (1, 8, 36, 144)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--rounds", type=command.count, default=5, help="rounds of all in turns")


def run(flags: argparse.Namespace) -> None:
    """Print both tables."""
    columns = ["loop", *(f"sweep of {size}" for size in BATCHES), "compile each"]
    print(tables.head("tokens", "features", *columns))
    for tokens, features in SIZES:
        print(race(tokens, features, flags.rounds), flush=True)
    print(f"\n{tables.head('edit', 'temporaries, MiB')}")
    for name, changes in {
        "none": {}, "q, k, v, z and a score of each head": {
            **{f"attention_{point}": Edit(np.ones((8, 1))) for point in "qkvz"},
            "attention_scores": Edit(np.ones((8, 1, 1))),
        },
        "weights of one head": {"attention_weights": Edit(0.5, heads=(3,))},
        "weights of all 8": {"attention_weights": Edit(0.5)},
    }.items():  # fmt: skip
        print(tables.line(name, f"{memory(changes):.0f}"), flush=True)


def race(tokens: int, features: int, rounds: int) -> str:
    """Return the line of one size: seconds of the loop, and ratios to it."""
    model = Encoder(LAYERS, EncoderBlock(MultiHeadAttention(HEADS), 4 * features))
    x = jax.random.normal(jax.random.key(0), (1, tokens, features))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    count = LAYERS * HEADS
    keep = 1 - jnp.eye(count).reshape(count, LAYERS, HEADS, 1)
    changes = {f"layers_{i}/attention/attention_z": Edit(keep[:, i]) for i in range(LAYERS)}

    def mean(changes: Any, variables: Any, x: jax.Array) -> jax.Array:
        out: Any = model.apply({**variables, "edits": unflatten_dict(changes, sep="/")}, x)
        return jnp.mean(out)

    one = jax.jit(mean)
    each = [{name: Edit(edit.keep[i]) for name, edit in changes.items()} for i in range(count)]
    edits.attach(model, variables, each[0], x)
    calls: dict[str, Callable[[], Any]] = {
        "loop": lambda: [one(change, variables, x) for change in each]
    }
    for size in BATCHES:
        calls[f"sweep of {size}"] = functools.partial(
            edits.sweep, mean, changes, variables, x, batch_size=size
        )
    works = {name: Work(call, jax.block_until_ready) for name, call in calls.items()}
    times: Any = interleave(works, rounds, math.inf)
    loop, *others = (times[name].median for name in works)
    start = time.perf_counter()
    constant = jax.jit(functools.partial(mean, each[0]))
    jax.block_until_ready(constant(variables, x))
    compiled = count * (time.perf_counter() - start)
    ratios = [f"{loop / other:.1f} ×" for other in others]
    best = min(others)
    each_one = f"{compiled:.0f} s, {compiled / best:.0f} × the best"
    return tables.line(tokens, features, f"{loop:.2f} s", *ratios, each_one)


def memory(changes: Any) -> float:
    """Return the MiB of temporaries of a layer at 4,096 tokens, forward."""
    layer = MultiHeadAttention(8, kernel="blockwise", mask=masks.Causal())
    x = jax.ShapeDtypeStruct((1, 4096, 512), jnp.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    attached = {**variables, "edits": changes}
    analysis: Any = jax.jit(layer.apply).lower(attached, x).compile().memory_analysis()
    return float(analysis.temp_size_in_bytes / 2**20)
