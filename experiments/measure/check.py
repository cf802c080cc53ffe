"""Run the kernels of the device that is here, and compare them with the reference.

    python -m experiments.measure check                         # 5 minutes at most
    python -m experiments.measure check --calls=causal,packed

Run it first on a kind of TPU or GPU that is new to you. Each call takes random queries, keys and
values, shorter ones on a CPU. `reference` computes the output and the gradients in float32, with
matmuls of the highest precision, and each kernel that takes the call has to agree. The table has

    ms       for the output and the gradients, the median of three runs, kernels in turns
    refused  if the kernel does not take the call
    DIFFERS  with the error of the worst token or array, beyond the bound
    FAILED   with the reason, if the kernel does not compile or run

A token's error is the norm of its vector's error, relative to the norm of usual vectors of the
array. The command ends with status 1 if a kernel differs or fails.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import command
from experiments.measure import machine, timing
from experiments.measure.results import Table, counted
from flax_mha import KVCache, dot_product_attention, masks, positions, scores, sharding

# The worst token's error of half precision, and of float32.
BOUNDS = {"bfloat16": 0.05, "float32": 0.002}
RUNS = 3
SECONDS = 300.0  # no call begins after this time


class Sizes(NamedTuple):
    """The queries T, keys S, query heads N, key/value heads K and features H, Hv of a call."""

    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int


LARGE, SMALL = Sizes(2048, 2048, 8, 2, 128, 128), Sizes(256, 256, 2, 1, 16, 16)


class Call(NamedTuple):
    """A call of attention.

    Attributes:
      options: the arguments besides q, k and v, from the sizes and the learned array.
      learned: the shape of the learned array, or None.
      change: the sizes of this call, from those of most calls.
      dtype: the dtype of q, k and v.
      attend: the function that is called.
      huge: True if later keys and values, which the mask hides, are huge. This must change nothing.
    """

    options: Callable[..., dict[str, Any]]
    learned: Callable[[Sizes], tuple[int, ...] | None] = lambda n: None
    change: Callable[[Sizes], Sizes] = lambda n: n
    dtype: str = "bfloat16"
    attend: Callable[..., jax.Array] = dot_product_attention
    huge: bool = False


def _last_of_cache(q: jax.Array, k: jax.Array, v: jax.Array, **call: Any) -> jax.Array:
    """Attend from the last tokens of a cache."""
    (*B, S, K, H), T = k.shape, q.shape[-3]
    cache = KVCache.empty(tuple(B), S, K, H, v.shape[-1], dtype=k.dtype)
    cache = cache.append(k[:, :-T], v[:, :-T])
    out, _ = cache.extend(q, k[:, -T:], v[:, -T:], **call)
    return out


def _rotated(q: jax.Array, k: jax.Array, v: jax.Array, **call: Any) -> jax.Array:
    """Attend from queries to keys that the kernel rotates, if it can."""
    rotation = positions.Rotary()

    def turned(x: jax.Array) -> Any:
        return rotation.turn(x, jnp.arange(x.shape[-3]))

    return dot_product_attention(turned(q), turned(k), v, **call)


CAUSAL, ROWS = masks.Causal(), np.array([[1], [2]])
# Those that compile fast come first.
CALLS: dict[str, Call] = {
    "full": Call(lambda n: {}),
    "causal": Call(lambda n: {"mask": CAUSAL}),
    "float32": Call(lambda n: {"mask": CAUSAL, "precision": "highest"}, dtype="float32"),
    "window": Call(lambda n: {"mask": masks.Window(n.T // 8, 0)}),
    "packed": Call(
        lambda n: {"mask": CAUSAL & masks.Segments(jnp.asarray(np.arange(n.T) * 5 // n.T // ROWS))}
    ),
    "lengths": Call(lambda n: {"mask": masks.Lengths(jnp.array([n.S // 3, n.S]))}),
    "array": Call(lambda n: {"mask": jnp.asarray(np.tri(n.T, n.S, n.S // 5, bool))}),
    "predicate": Call(
        lambda n: {"mask": masks.Predicate(lambda row, head, i, j: (i + j + head) % 3 > 0)}
    ),
    "per head": Call(
        lambda n: {"mask": masks.PerHead([CAUSAL, masks.Window(9, 9)] * (n.N // 2))}
    ),
    "cross": Call(lambda n: {}, change=lambda n: n._replace(S=3 * n.T // 4 + 40)),
    "wide values": Call(lambda n: {"mask": CAUSAL}, change=lambda n: n._replace(Hv=2 * n.H)),
    "soft cap": Call(lambda n: {"mask": CAUSAL, "scores": (scores.SoftCap(20.0),)}),
    "slopes": Call(lambda n, x: {"mask": CAUSAL, "scores": (scores.Alibi(x),)}, lambda n: (n.N,)),
    "bias": Call(lambda n, x: {"bias": x}, lambda n: (n.N, n.T, n.S)),
    "table": Call(lambda n, x: {"scores": (scores.RelativeBias(x),)}, lambda n: (n.N, 32)),
    "sinks": Call(lambda n, x: {"mask": CAUSAL, "sinks": x}, lambda n: (n.N,)),
    "dropout": Call(
        lambda n: {"mask": CAUSAL, "dropout_rate": 0.2, "dropout_rng": jax.random.key(3)}
    ),
    "rotated": Call(lambda n: {"mask": CAUSAL}, attend=_rotated),
    "cache": Call(lambda n: {}, change=lambda n: n._replace(T=n.T // 32), attend=_last_of_cache),
    "huge": Call(lambda n: {"mask": masks.Lengths(jnp.array([n.S // 3, n.S // 2]))}, huge=True),
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    about = f"calls to check (default: all): {', '.join(CALLS)}"
    parser.add_argument("--calls", type=command.among([*CALLS]), default=[*CALLS],
                        metavar="CALL,…", help=about)  # fmt: skip


def run(flags: argparse.Namespace) -> None:
    """Check call by call."""
    names = [name for name in machine.kernels() if name != "reference"]
    facts = machine.describe()
    sizes = SMALL if facts["platform"] == "cpu" else LARGE
    table = Table(flags.workdir, f"check-{sharding.platform()}", facts["device"], *names, **facts)
    for name, call in counted("checking", {name: CALLS[name] for name in flags.calls}, SECONDS):
        found = check(call, names, call.change(sizes))
        table.add({"call": name, **found}, name, *map(cell, found.values()))
    table.end()
    statuses = {row[name]["status"] for row in table.rows for name in names}
    if statuses & {"DIFFERS", "failed"}:
        sys.exit(1)


def check(call: Call, kernels: Any, n: Sizes) -> dict[str, Any]:
    """Return how each kernel does in a call: its status, and the error, time or reason."""
    rng = np.random.default_rng(0)
    shapes = (2, n.T, n.N, n.Hv), (2, n.T, n.N, n.H), (2, n.S, n.K, n.H), (2, n.S, n.K, n.Hv)
    cotangent, q, *kv = (jnp.asarray(rng.normal(size=shape), call.dtype) for shape in shapes)
    if call.huge:
        kv = [x.at[:, n.S // 2 :].set(1e30) for x in kv]
    arrays = [cotangent, q, *kv]
    if shape := call.learned(n):
        arrays.append(jnp.asarray(rng.normal(size=shape), "float32"))

    def both(kernel: str, **more: str) -> Callable[..., Any]:
        def attend(q: Any, k: Any, v: Any, *learned: Any) -> jax.Array:
            options = call.options(n, *learned)
            return call.attend(q, k, v, kernel=kernel, **{**options, **more})

        return timing.with_gradients(attend)

    wide = [x.astype(jnp.float32) for x in arrays]
    expected = jax.jit(both("reference", precision="highest"))(*wide)
    errors = {}

    def build(kernel: str) -> timing.Work:
        work = timing.program(both(kernel), arrays)
        errors[kernel] = max(map(worst, work.call(), expected))
        return work

    builds = {kernel: functools.partial(build, kernel) for kernel in kernels}
    rows = timing.race(builds, RUNS, 60.0)
    for kernel, row in rows.items():
        if row["status"] == "ok":
            row["error"] = errors[kernel]
            row["status"] = "holds" if row["error"] <= BOUNDS[call.dtype] else "DIFFERS"
    return rows


def worst(got: Any, expected: Any) -> float:
    """Return the error of the worst token, relative to a usual one; infinite if one is NaN."""
    a, b = (np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in (got, expected))
    if not np.isfinite(a).all():
        return float("inf")
    sizes = np.linalg.norm(b, axis=-1)
    usual = np.sqrt(np.mean(sizes**2)) or 1.0
    return float(np.max(np.linalg.norm(a - b, axis=-1) / np.maximum(sizes, usual)))


def cell(row: dict[str, Any]) -> str:
    """Return a kernel's cell of the table."""
    if row["status"] == "holds":
        return f"{1000 * row['median']:.2f} ms"
    if row["status"] == "DIFFERS":
        return f"DIFFERS {row['error']:.3g}"
    return "refused" if row["status"] == "refused" else f"FAILED: {row['reason']}"
