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

# Masks of one query and of one key.
query, key = np.indices((1, 1, 5, 5))[2:]
ROW, KEY = query == 1, key == 2
LOWEST = float(np.finfo(np.float32).min)


def qkv(T: int = 5, S: int = 5, N: int = 2, K: int = 2, H: int = 8) -> list[np.ndarray]:
    """Return random queries and keys, and one-hot values."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, *shape), np.float32) for shape in ((T, N, H), (S, K, H)))
    return [q, k, np.repeat(np.eye(S, H, dtype=np.float32)[None, :, None], K, 2)]


def weights(library: Library, *qkv: np.ndarray, head: int = 0, **call: Any) -> np.ndarray:
    """Return the output of one head, [T, H]."""
    if not library.is_torch:
        return np.asarray(library(*map(jnp.asarray, qkv), **call))[0, :, head]
    import torch

    def tensor(x: Any) -> Any:
        return torch.from_dlpack(jnp.asarray(x)) if isinstance(x, np.ndarray) else x

    with torch.no_grad():
        out = library(*map(tensor, qkv), **{name: tensor(x) for name, x in call.items()})
    return out.float().numpy()[0, :, head]


def row(weights: np.ndarray, keys: int = 5) -> str:
    """Say what the weights of a query without a key are."""
    if np.isnan(weights).any():
        return "NaN"
    if np.abs(weights).max() < 1e-12:
        return "0"
    return "mean of all" if np.allclose(weights[:keys], 1 / keys, atol=1e-4) else "as without mask"


def polarity(library: Library) -> str:
    """Say what True does in a boolean mask."""
    return "hides" if weights(library, *qkv(), mask=KEY)[1, 2] < 1e-6 else "attends"


def no_key(library: Library) -> str:
    """Hide all keys of one query with a boolean mask."""
    return row(weights(library, *qkv(), mask=(polarity(library) == "hides") == ROW)[1])


def nan(library: Library) -> str:
    """Say whether NaN in the value of a hidden key reaches outputs."""
    q, k, v = qkv()
    v[:, 2] = np.nan
    out = weights(library, q, k, v, mask=(polarity(library) == "hides") == KEY)
    return "leaks" if np.isnan(out).any() else "stays"


def added(library: Library, number: float, where: np.ndarray) -> np.ndarray:
    """Return the weights of the second query, with a number as the additive mask of some pairs."""
    return weights(library, *qkv(), numbers=np.where(where, number, 0).astype(np.float32))[1]


def additive(library: Library) -> str:
    """Say whether numbers are added to scores."""
    weight = added(library, -1e9, KEY)[2]
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
    v[:, :, 1] *= -1
    return "n % K" if weights(library, q, k, v, head=1)[0].sum() < 0 else "n // G"


def window(library: Library) -> str:
    """Say which keys a query sees through a window W of 2."""
    seen = np.flatnonzero(weights(library, *qkv(8, 8), window=2)[4] > 1e-9) - 4
    return "W on each side" if [*seen] == [-2, -1, 0, 1, 2] else f"from {seen[0]} to {seen[-1]}"


def softmax(library: Library) -> str:
    """Return the dtype of the softmax for bfloat16 inputs, and of its scores if they are rounded.

    The scores are 16.03 and 16, which bfloat16 can't tell apart. JAX's programs show the dtype of
    the exponential. PyTorch computes its softmax in float32 on a CPU.
    """
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv(2, 2, N=1, K=1, H=16))
    q[:], k[:], k[0, 0, 0, 0] = 1, 4, 4.125
    dtype = "f32"
    if not library.is_torch:
        program = str(jax.make_jaxpr(library.__call__)(*map(jnp.asarray, (q, k, v))))
        dtype = ", ".join(sorted(set(re.findall(r":(\w+)\[[^\]]*\] = exp", program))))
    rounded = weights(library, q, k, v)[0, 0] < 0.504
    return f"{dtype} of bf16 scores" if rounded and dtype == "f32" else dtype


def of_parameters(library: Library) -> dict[str, str]:
    """Return which projections have biases, and the deviation of the query's initial matrix."""
    parameters = library.layer(library.load()) if library.layer else {}
    biased = [name for name in ("query", "key", "value", "out") if "bias" in parameters[name]]
    return {
        "biases": " ".join(name[0] for name in biased) or "none",
        "deviation of q": f"{np.std(parameters['query']['kernel']):.3f}",
    }


# The columns of the page that are measured: what a library must accept, and the measurement.
MEASURED: dict[str, tuple[str, Callable[[Library], str]]] = {
    "True": ("mask", polarity),
    "numbers": ("numbers", additive),
    "no key": ("mask", no_key),
    "−inf": ("numbers", lambda library: row(added(library, -np.inf, ROW))),
    "finfo.min": ("numbers", lambda library: row(added(library, LOWEST, ROW))),
    "NaN": ("mask", nan),
    "causal, T ≠ S": ("causal", causal),
    "window W": ("window", window),
    "groups": ("groups", groups),
    "softmax": ("", softmax),
}


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def measure(library: Library) -> dict[str, str]:
    """Return the cells of a library by column. "Refused" means that the package raises an error."""
    found = {}
    for column, (needed, measurement) in MEASURED.items():
        if not needed or needed in library.accepts:
            try:
                found[column] = measurement(library)
            except Exception:  # Packages raise errors of their own.
                found[column] = "refused"
    return found | (of_parameters(library) if library.layer else {})
