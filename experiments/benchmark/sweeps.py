"""The time of removing each head of a model by one program, and the memory of edits.

    python -m experiments.benchmark.sweeps    # four minutes: the tables of docs/look-inside.md

144 heads are removed one by one from an encoder of 12 layers with 12 heads. `sweep` is compared
with a loop of one jitted function, in turns, and with 144 times the compilation of one program.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from experiments.runs import command
from flax_mha import Encoder, EncoderBlock, MultiHeadAttention, edits, masks
from flax_mha.edits import Edit

LAYERS = HEADS = 12
# Tokens and features of one example.
SIZES = ((16, 48), (64, 96), (128, 192), (256, 384))
BATCHES = (1, 8, 36, 144)


def main(argv: Sequence[str]) -> None:
    """Print both tables as Markdown."""
    parser = command.Parser(__doc__)
    parser.add_argument("--rounds", type=command.count, default=5, help="rounds of all in turns")
    flags = parser.parse_args(argv)
    columns = ["loop", *(f"sweep of {size}" for size in BATCHES), "compile each"]
    print("| tokens | features | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 2) + "|")
    for tokens, features in SIZES:
        print(race(tokens, features, flags.rounds), flush=True)
    print("\n| edit | temporaries, MiB |\n|---|---|")
    for name, changes in {
        "none": {}, "q, k, v, z and a score of each head": {
            **{f"attention_{point}": Edit(np.ones((8, 1))) for point in "qkvz"},
            "attention_scores": Edit(np.ones((8, 1, 1))),
        },
        "weights of one head": {"attention_weights": Edit(0.5, heads=(3,))},
        "weights of all 8": {"attention_weights": Edit(0.5)},
    }.items():  # fmt: skip
        print(f"| {name} | {memory(changes):.0f} |", flush=True)


def race(tokens: int, features: int, rounds: int) -> str:
    """Return the line of one size: seconds of the loop, and ratios to it."""
    model = Encoder(LAYERS, EncoderBlock(MultiHeadAttention(HEADS), 4 * features))
    x = jax.random.normal(jax.random.key(0), (1, tokens, features))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    count = LAYERS * HEADS
    keep = 1 - jnp.eye(count).reshape(count, LAYERS, HEADS, 1)
    changes = {f"layers_{i}/attention/attention_z": Edit(keep[:, i]) for i in range(LAYERS)}

    def run(changes: Any, variables: Any, x: jax.Array) -> jax.Array:
        out: Any = model.apply({**variables, "edits": unflatten_dict(changes, sep="/")}, x)
        return jnp.mean(out)

    one = jax.jit(run)
    each = [{name: Edit(edit.keep[i]) for name, edit in changes.items()} for i in range(count)]
    edits.attach(model, variables, each[0], x)
    works: dict[str, Callable[[], Any]] = {
        "loop": lambda: [one(change, variables, x) for change in each]
    }
    for size in BATCHES:
        works[f"sweep of {size}"] = functools.partial(
            edits.sweep, run, changes, variables, x, batch_size=size
        )
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            start = time.perf_counter()
            jax.block_until_ready(work())
            if turn:  # The first one compiles.
                seconds[name].append(time.perf_counter() - start)
    loop, *others = (statistics.median(times) for times in seconds.values())
    start = time.perf_counter()
    constant = jax.jit(functools.partial(run, each[0]))
    jax.block_until_ready(constant(variables, x))
    compiled = count * (time.perf_counter() - start)
    ratios = [f"{loop / other:.1f} ×" for other in others]
    best = min(others)
    return " | ".join(
        [f"| {tokens}", str(features), f"{loop:.2f} s", *ratios,
         f"{compiled:.0f} s, {compiled / best:.0f} × the best |"]
    )  # fmt: skip


def memory(changes: Any) -> float:
    """Return the MiB of temporaries of a layer at 4,096 tokens, forward."""
    layer = MultiHeadAttention(8, kernel="blockwise", mask=masks.Causal())
    x = jax.ShapeDtypeStruct((1, 4096, 512), jnp.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    attached = {**variables, "edits": changes}
    analysis: Any = jax.jit(layer.apply).lower(attached, x).compile().memory_analysis()
    return float(analysis.temp_size_in_bytes / 2**20)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
