"""Run the kernels of the device that is here, and compare them with the reference.

    python -m experiments.measure check                        # 5 minutes at most
    python -m experiments.measure check --kernels=flex --calls=causal,packed

Run it first on a kind of TPU or GPU that is new to you. Each call takes random queries, keys and
values. `reference` computes its output and gradients in float32, with matmuls of the highest
precision, and each kernel that takes the call has to agree. The table has

    milliseconds  of the output and the gradients, the least of three runs
    refused       if the kernel does not take the call
    DIFFERS       with the error of the worst token or array, beyond the bound
    FAILED        if the kernel does not compile or run; the reasons are below the table

A token's error is that of its vector, relative to a usual one of the array. The command ends with
status 1 if a kernel differs or fails. The table, as table.md, and results.json go to --workdir.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import tables
from experiments.measure import machine, timing
from experiments.phases import Phase
from experiments.runs import command, folders
from experiments.runs.failures import RunError
from flax_mha import KVCache, dot_product_attention, masks, positions, scores, sharding
from flax_mha.kernels import KERNELS
from flax_mha.positions.turn import Turned

# The worst token's error of half precision, and of float32.
BOUNDS = {"bfloat16": 0.05, "float32": 0.002}
RUNS = 3
# The words of a kernel that does not take a call.
REFUSAL = "can't run this call: "


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
      options: the arguments beside q, k and v, from the sizes and the learned arrays.
      learned: the shapes of the learned arrays.
      change: the sizes of this call, from those of most calls.
      dtype: the dtype of q, k and v.
      attend: the function that is called (default: `dot_product_attention`).
    """

    options: Callable[..., dict[str, Any]]
    learned: Callable[[Sizes], tuple[tuple[int, ...], ...]] = lambda n: ()
    change: Callable[[Sizes], Sizes] = lambda n: n
    dtype: str = "bfloat16"
    attend: Callable[..., jax.Array] | None = None


def _last_of_cache(q: jax.Array, k: jax.Array, v: jax.Array, **call: Any) -> jax.Array:
    """Attend from the last tokens of a cache."""
    (*B, S, K, H), T = k.shape, q.shape[-3]
    cache = KVCache.empty(tuple(B), S, K, H, v.shape[-1], dtype=k.dtype).append(k, v)
    return cache.attend(q, jnp.broadcast_to(jnp.arange(S - T, S), (*B, T)), **call)


def _rotated(q: jax.Array, k: jax.Array, v: jax.Array, **call: Any) -> jax.Array:
    """Attend from queries to keys that the kernel rotates, if it can."""
    rotation = positions.Rotary()

    def turned(x: jax.Array) -> Any:
        return Turned(x, rotation.turn(x, jnp.arange(x.shape[-3])))

    return dot_product_attention(turned(q), turned(k), v, **call)


def _packed(n: Sizes) -> dict[str, Any]:
    ids = jnp.asarray(np.arange(n.T) * 5 // n.T)
    return {"mask": CAUSAL & masks.Segments(jnp.stack([ids, ids // 2]))}


CAUSAL = masks.Causal()
CALLS: dict[str, Call] = {
    "full": Call(lambda n: {}),
    "causal": Call(lambda n: {"mask": CAUSAL}),
    "float32": Call(lambda n: {"mask": CAUSAL, "precision": "highest"}, dtype="float32"),
    "window": Call(lambda n: {"mask": masks.Window(n.T // 8, 0)}),
    "packed": Call(_packed),
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
    "slopes": Call(
        lambda n, x: {"mask": CAUSAL, "scores": (scores.Alibi(x),)}, lambda n: ((n.N,),)
    ),
    "bias": Call(lambda n, x: {"bias": x}, lambda n: ((n.N, n.T, n.S),)),
    "table": Call(lambda n, x: {"scores": (scores.RelativeBias(x),)}, lambda n: ((n.N, 32),)),
    "sinks": Call(lambda n, x: {"mask": CAUSAL, "sinks": x}, lambda n: ((n.N,),)),
    "dropout": Call(
        lambda n: {"mask": CAUSAL, "dropout_rate": 0.2, "dropout_rng": jax.random.key(3)}
    ),
    "rotated": Call(lambda n: {"mask": CAUSAL}, attend=_rotated),
    "cache": Call(lambda n: {}, change=lambda n: n._replace(T=n.T // 32), attend=_last_of_cache),
    # Masked keys and values are huge, which must change nothing.
    "huge": Call(lambda n: {"mask": masks.Lengths(jnp.array([n.S // 3, n.S // 2]))}),
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    every = ",".join(CALLS)
    parser.add_argument("--kernels", type=command.among([*KERNELS]), help="default: all there are")
    parser.add_argument("--calls", type=command.among([*CALLS]), default=every, help=every)
    parser.add_argument("--total", type=command.seconds, default=300.0, help="the time limit")
    parser.add_argument("--small", action="store_true", help="short calls, to try the command")
    parser.add_argument("--workdir", metavar="FOLDER")


def run(flags: argparse.Namespace) -> None:
    """Check call by call, and print and write the table."""
    platform = sharding.platform()
    here = [name for name in machine.kernels() if name != "reference"]
    names, calls = flags.kernels or here, flags.calls
    if unknown := [name for name in names if name not in here]:
        raise RunError(f"--kernels must be some of {','.join(here)}, got {unknown[0]!r}")
    folder = folders.result_folder(flags.workdir, f"check-{platform}")
    end, sizes = time.perf_counter() + flags.total, SMALL if flags.small else LARGE
    device = jax.devices()[0].device_kind
    found: dict[str, dict[str, dict[str, Any]]] = {
        name: {kernel: {"status": "no time"} for kernel in names} for name in calls
    }
    for name in calls:
        expected: dict[str, Any] = {}
        with Phase(f"checking {name}"):
            for kernel in names:
                if time.perf_counter() < end:
                    found[name][kernel] = check(kernel, name, sizes, expected)
        # After each call, for a command that is stopped.
        table = page(device, names, found)
        results = {"device": device, "jax": jax.__version__, "found": found}
        place = tables.write(folder, table, results)
    print(f"{table}\n\n{place}")
    if any(x["status"] in ("DIFFERS", "FAILED") for row in found.values() for x in row.values()):
        sys.exit(1)


def check(kernel: str, name: str, sizes: Sizes, expected: dict[str, Any]) -> dict[str, Any]:
    """Return how a kernel does in a call: its status, and the error, time or reason.

    `expected` keeps the reference's results for the next kernels.
    """
    call, arrays = CALLS[name], inputs(name, sizes)
    options = functools.partial(call.options, call.change(sizes))
    try:
        function = _both(call.attend, kernel, options).lower(*arrays).compile()
        if name not in expected:
            wide = [x.astype(jnp.float32) for x in arrays]
            expected[name] = jax.device_get(
                _both(call.attend, "reference", options, "highest")(*wide)
            )
        got = jax.device_get(function(*arrays))
        seconds = timing.fastest(lambda: function(*arrays), RUNS)
    except Exception as failure:  # a compiler's, or a device's
        said = str(failure)
        if REFUSAL in said:
            return {"status": "refused", "reason": said.split(REFUSAL)[1].split("; ")[0]}
        reason = (said.splitlines() or [""])[0][:300]
        return {"status": "FAILED", "reason": f"{type(failure).__name__}: {reason}"}
    error = max(map(worst, got, expected[name]))
    status = "holds" if error <= BOUNDS[call.dtype] else "DIFFERS"
    return {"status": status, "error": float(error), "milliseconds": 1000 * seconds}


def inputs(name: str, sizes: Sizes) -> list[jax.Array]:
    """Return q, k, v, a cotangent and the learned arrays of a call."""
    call = CALLS[name]
    T, S, N, K, H, Hv = n = call.change(sizes)
    rng = np.random.default_rng(0)
    shapes = [(2, T, N, H), (2, S, K, H), (2, S, K, Hv), (2, T, N, Hv)]
    arrays = [jnp.asarray(rng.normal(size=shape), call.dtype) for shape in shapes]
    if name == "huge":
        arrays[1:3] = [x.at[:, S // 2 :].set(1e30) for x in arrays[1:3]]
    return arrays + [jnp.asarray(rng.normal(size=shape), "float32") for shape in call.learned(n)]


def _both(
    function: Any, kernel: str, options: Callable[..., Any], precision: str | None = None
) -> Any:
    """Return a function of the arrays to the output and all gradients."""
    function = function or dot_product_attention

    def both(q: Any, k: Any, v: Any, cotangent: Any, *learned: Any) -> list[jax.Array]:
        def attend(q: Any, k: Any, v: Any, *learned: Any) -> jax.Array:
            given = options(*learned) | ({"precision": precision} if precision else {})
            return function(q, k, v, kernel=kernel, **given)

        out, pull = jax.vjp(attend, q, k, v, *learned)
        return [out, *pull(cotangent.astype(out.dtype))]

    return jax.jit(both)


def worst(got: Any, expected: Any) -> float:
    """Return the error of the worst token, relative to a usual one; infinite if one is NaN."""
    a, b = (np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in (got, expected))
    if not np.isfinite(a).all():
        return float("inf")
    sizes = np.linalg.norm(b, axis=-1)
    usual = np.sqrt(np.mean(sizes**2)) or 1.0
    return float(np.max(np.linalg.norm(a - b, axis=-1) / np.maximum(sizes, usual)))


def page(device: str, names: list[str], found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the table in Markdown, and the reasons of failures."""
    lines = [tables.head(device, *names)]
    reasons = []
    for name, row in found.items():
        cells = []
        for kernel in names:
            result = row[kernel]
            status = result["status"]
            if status == "FAILED":
                reasons.append(f"- {kernel}, {name}: {result['reason']}")
            more = f" {result['error']:.3g}" if status == "DIFFERS" else ""
            cells.append(f"{result['milliseconds']:.2f} ms" if status == "holds" else status + more)
        lines.append(tables.line(name, *cells))
    return "\n".join([*lines, *([""] if reasons else []), *reasons])
