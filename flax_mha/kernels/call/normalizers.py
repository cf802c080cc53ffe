"""The functions from scores to attention weights: the softmax and its alternatives.

| normalizer | the weight of key j |
|---|---|
| `"softmax"` | exp(sⱼ) / Σ exp(s) |
| `"sigmoid"` | 1 / (1 + exp(−sⱼ + log S)) |
| `"softpick"` | max(exp(sⱼ) − 1, 0) / (Σ abs(exp(s) − 1) + 10⁻⁸) |

Sums run over the keys that the mask allows. S is the number of keys, without the padding that a
layer's `lengths`, `masks.Lengths` of each row, or `masks.Keys` hide; other masks do not change it.
With a cache S is the row's length after the call, whatever the number of slots: all tokens of
earlier calls and of this one, later ones included. Only `reference` computes the last two.

Sources: Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", 2024;
Zuhri et al., "Softpick: No Attention Sink, No Massive Activations with Rectified Softmax", 2025.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from flax_mha import masks
from flax_mha.base.coordinates import ScoreArray, whole
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.mask_parts import conjuncts


def sigmoid(s: jax.Array, allowed: jax.Array | None, count: ScoreArray | None = None) -> jax.Array:
    """Return the sigmoid weights of scores [*B, N, T, S], with `count` in place of S if given."""
    S = s.shape[-1] if count is None else count.array
    p = jax.nn.sigmoid(s - jnp.log(jnp.maximum(jnp.asarray(S, s.dtype), 1.0)))
    return p if allowed is None else jnp.where(allowed, p, 0.0)


def softpick(s: jax.Array, allowed: jax.Array | None, _: ScoreArray | None = None) -> jax.Array:
    """Return the softpick weights of scores [*B, N, T, S]."""
    # Divide numerator and denominator by exp(top). A top below 0 would make exp(−top) overflow.
    top = jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True, initial=0.0))
    # exp(s) − 1 would lose the digits of a score near 0, and overflow for a large one.
    above, below = jnp.where(s > 0, s, 0.0), jnp.where(s > 0, 0.0, s)
    above, below = -jnp.exp(above - top) * jnp.expm1(-above), jnp.exp(-top) * jnp.expm1(below)
    e = jnp.where(s > 0, above, below)
    e = e if allowed is None else jnp.where(allowed, e, 0.0)
    total = jnp.sum(jnp.abs(e), axis=-1, keepdims=True)
    return jnp.maximum(e, 0.0) / (total + 1e-8 * jnp.exp(-top))


SOFTMAX = "softmax"
OTHERS: dict[str, Callable[[jax.Array, jax.Array | None, ScoreArray | None], jax.Array]] = {
    "sigmoid": sigmoid,
    "softpick": softpick,
}


def count_keys(mask: masks.Mask | None, dims: Dims, is_whole: bool) -> ScoreArray | None:
    """Return the number of keys without padding [*B|1, 1, 1, 1], or None for all S keys.

    With `is_whole` it is at most S. Without, a row can be longer than the slots of its ring buffer.
    """
    parts = conjuncts(mask)
    # By type, before they are bound: for one query, tables of pairs have the shape of these too.
    lengths = [x for x in parts if type(x) is masks.Lengths and jnp.ndim(x.kv) <= len(dims.B)]
    ends = [jnp.asarray(x.bind(dims).kv.array) for x in lengths]
    at = whole(dims)
    tables = [x.bind(dims).allowed(at) for x in parts if type(x) is masks.Keys]
    if tables:
        real = functools.reduce(jnp.logical_and, tables + [at.k < n for n in ends])
        return ScoreArray(real.sum(-1, keepdims=True))
    if not ends:
        return None
    return ScoreArray(functools.reduce(jnp.minimum, ends + [jnp.asarray(dims.S)] * is_whole))
