"""Measurements of one library: the cells of its row in the tables of docs/conventions.md.

Values are one-hot, so that an output shows the weights of the keys.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.measure.conventions.libraries import Library

ROW, KEY = np.arange(5)[:, None] == 1, np.arange(5)[None] == 2  # What measurements hide.
LOWEST = float(np.finfo(np.float32).min)


def qkv(T: int = 5, S: int = 5, N: int = 2, K: int = 2, H: int = 8) -> list[np.ndarray]:
    """Return random queries and keys, and one-hot values."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, *shape), np.float32) for shape in ((T, N, H), (S, K, H)))
    return [q, k, np.repeat(np.eye(S, H, dtype=np.float32)[None, :, None], K, 2)]


def weights(library: Library, *qkv: np.ndarray, head: int = 0, **call: Any) -> np.ndarray:
    """Return the output of one head, [T, H], given arguments by what they are for."""
    call = {library.accepts[name]: x for name, x in call.items()}
    attend = library.function()
    if not library.is_torch:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return np.asarray(attend(*map(jnp.asarray, qkv), **call))[0, :, head]
    import torch

    call = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in call.items()}
    dtype = getattr(torch, qkv[0].dtype.name)
    tensors = [torch.tensor(x.astype(np.float32), dtype=dtype) for x in qkv]
    with torch.no_grad():
        return attend(*tensors, **call).float().numpy()[0, :, head]


def row(weights: np.ndarray, keys: int = 5) -> str:
    """Name the weights of a query that should have no key."""
    if np.isnan(weights).any():
        return "NaN"
    if np.abs(weights).max() < 1e-12:
        return "0"
    return "mean of all" if np.allclose(weights[:keys], 1 / keys, atol=1e-4) else "as without mask"


def masked(library: Library, mask: np.ndarray, v: np.ndarray | None = None) -> np.ndarray:
    """Return weights under a boolean mask that broadcasts to [5, 5]."""
    q, k, values = qkv()
    mask = np.broadcast_to(mask, (1, 1, 5, 5)).copy()
    return weights(library, q, k, values if v is None else v, mask=mask)


def polarity(library: Library) -> str:
    """Say what True does in a boolean mask."""
    return "hides" if masked(library, KEY)[1, 2] < 1e-6 else "attends"


def no_key(library: Library) -> str:
    """Hide all keys of one query by a boolean mask."""
    return row(masked(library, (polarity(library) == "hides") == ROW)[1])


def nan(library: Library) -> str:
    """Say whether NaN in the value of a hidden key reaches outputs."""
    v = np.where(KEY.reshape(1, 5, 1, 1), np.nan, qkv()[2])
    found = masked(library, (polarity(library) == "hides") == KEY, v.astype(np.float32))
    return "leaks" if np.isnan(found).any() else "stays"


def added(library: Library, number: float, where: np.ndarray) -> np.ndarray:
    """Return weights with a number as the additive mask of some pairs."""
    numbers = np.broadcast_to(np.where(where, np.float32(number), np.float32(0)), (1, 1, 5, 5))
    return weights(library, *qkv(), numbers=numbers.copy())


def additive(library: Library) -> str:
    """Say whether numbers are added to scores."""
    weight = added(library, -1e9, KEY)[1, 2]
    return "added" if weight < 1e-6 else "inverted" if weight > 0.999 else "ignored"


def causal(library: Library) -> str:
    """Say which corner the causal mask starts from if there are more keys, or more queries."""
    found = []
    for T, S in ((3, 5), (5, 3)):
        seen, empty = weights(library, *qkv(T, S), causal=True)[:, :S], max(T - S, 0)
        if np.array_equal(seen > 1e-9, np.tri(T, S)):
            found.append("top left")
        elif np.array_equal(seen[empty:] > 1e-9, np.tri(T, S, S - T)[empty:]):
            found.append(f"first rows {row(seen[0], S)}" if empty else "bottom right")
    return found[0] if found[0] == found[1] else "; T > S: ".join(found)


def groups(library: Library) -> str:
    """Say which of two key/value heads the second of four query heads reads."""
    q, k, v = qkv(N=4)
    v[:, :, 1] = -v[:, :, 1]
    return "n % K" if weights(library, q, k, v, head=1)[0].sum() < 0 else "n // G"


def window(library: Library) -> str:
    """Say which keys a query sees through a window W of 2."""
    seen = np.flatnonzero(weights(library, *qkv(8, 8), window=2)[4] > 1e-9) - 4
    first, last = int(seen[0]), int(seen[-1])
    reaches = {(-2, 2): "W on each side", (-2, 0): "W + 1 keys", (-1, 0): "W keys"}
    return reaches.get((first, last), f"from {first} to {last}")


def softmax(library: Library) -> str:
    """Return the dtype of the softmax of bfloat16 inputs, and that of its scores if it is another.

    Two scores differ by less than a rounding of bfloat16. JAX's programs show the dtype of the
    exponential; PyTorch computes its softmax in float32 on a CPU.
    """
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv(2, 2, N=1, K=1, H=16))
    q[..., 2:], q[..., :2], k[..., 0] = 0, (8, 1), 8
    k[0, :, 0, 1] = 0.125, 0
    dtype = "f32"
    if not library.is_torch:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            program = str(jax.make_jaxpr(library.function())(*map(jnp.asarray, (q, k, v))))
        dtype = ", ".join(sorted(set(re.findall(r":(\w+)\[[^\]]*\] = exp", program))))
    rounded = weights(library, q, k, v)[0, 0] < 0.504
    return f"{dtype} of bf16 scores" if rounded and dtype == "f32" else dtype


def parts(name: str) -> str:
    """Return the projections that a parameter belongs to."""
    if re.search("qkv|in_proj", name):
        return "q k v"
    letters = {"out": "o", "query": "q", "key": "k", "val": "v", "to_q": "q"}
    return next((letter for part, letter in letters.items() if part in name), "o")


def of_parameters(library: Library) -> dict[str, str]:
    """Return which projections have biases, and the deviation of the query's initial matrix."""
    parameters = library.parameters()
    biases = {name for name in parameters if re.search(r"bias|'b'", name)}
    found = {part for name in biases for part in parts(name).split()}
    matrix = next(parameters[x] for x in parameters.keys() - biases if "q" in parts(x))
    return {
        "biases": " ".join(part for part in "qkvo" if part in found) or "none",
        "deviation of q": f"{np.std(np.asarray(matrix.tolist())):.3f}",
    }


# The columns of the page that are measured: what a library must accept, and the measurement.
MEASURED: dict[str, tuple[str, Callable[[Library], str]]] = {
    "True": ("mask", polarity),
    "numbers": ("numbers", additive),
    "no key": ("mask", no_key),
    "−inf": ("numbers", lambda library: row(added(library, -np.inf, ROW)[1])),
    "finfo.min": ("numbers", lambda library: row(added(library, LOWEST, ROW)[1])),
    "NaN": ("mask", nan),
    "causal, T ≠ S": ("causal", causal),
    "window W": ("window", window),
    "groups": ("groups", groups),
    "softmax": ("", softmax),
}


def measure(library: Library) -> dict[str, str]:
    """Return the cells of a library by column. A package that raises refuses the call."""
    found = {}
    for column, (needed, measurement) in MEASURED.items():
        if not needed or needed in library.accepts:
            try:
                found[column] = measurement(library)
            except Exception:  # Any package's own.
                found[column] = "refused"
    if library.layer:
        found |= of_parameters(library)
    return found
