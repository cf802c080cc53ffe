"""A contestant's computation of a case, in one form for timing, memory and comparison."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.measure.peers.cases import Case
from experiments.measure.timing import Work


class Outcome(NamedTuple):
    """A result in the layout of the case, in float32, equal for all contestants.

    Attributes:
      out: the output [B, T, D], or [B, T, N, H] of a core.
      grads: the gradients of the inputs; empty for forward.
      norm: the norm of all parameter gradients together, whatever their layout.
    """

    out: np.ndarray
    grads: tuple[np.ndarray, ...]
    norm: float


def jitted(case: Case, apply: Callable[..., Any], params: Any = None) -> Work:
    """Build the work of a function (params, *inputs) → out under `jax.jit`.

    Args:
      case: the case to compute.
      apply: the function; it is traced once.
      params: a tree of arrays, cast to the case's dtype; differentiated if backward.
    """
    dtype = jnp.dtype(case.dtype)
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    inputs = [jnp.asarray(x, dtype) for x in case.inputs()]
    args = [params, *inputs]

    def both(cotangent: jax.Array, params: Any, *inputs: jax.Array) -> Any:
        out, pull = jax.vjp(apply, params, *inputs)
        return out, pull(cotangent)

    if case.backward:
        args = [jnp.asarray(case.cotangent(), dtype), *args]
    function = both if case.backward else apply
    compiled = jax.jit(function)

    def compile() -> Callable[[], Any]:
        # A new function, because jax caches traces of known ones.
        fresh = jax.jit(lambda *args: function(*args)).lower(*args).compile()
        return lambda: fresh(*args)

    def wait(result: Any) -> None:
        jax.block_until_ready(result)

    def outcome(result: Any) -> Outcome:
        out, (params, *grads) = result if case.backward else (result, (None,))
        flat = [float32(leaf) for leaf in jax.tree.leaves(params)]
        return Outcome(float32(out), tuple(map(float32, grads)), norm(flat))

    return Work(lambda: compiled(*args), wait, outcome, compile)


def float32(x: Any) -> np.ndarray:
    """Convert an array to float32 on the host."""
    return np.asarray(x).astype(np.float32)


def norm(arrays: Sequence[np.ndarray]) -> float:
    """Compute the square root of the sum of all squares."""
    return float(np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in arrays)))


def visible(case: Case) -> jax.Array | None:
    """Return the visible keys of each query, bool [T, T], traced. None if all are visible."""
    if not (case.causal or case.window or case.documents):
        return None
    q, k = jnp.arange(case.T)[:, None], jnp.arange(case.T)[None]
    reach = case.window or case.T
    seen = k > q - reach
    if case.documents:
        document = jnp.asarray(np.repeat(np.arange(case.documents), case.lengths()))
        seen &= document[:, None] == document[None]
    return seen & (k <= q if case.causal else k < q + reach)
