"""The definition of attention, which every kernel computes. Tests compare each kernel with it.

    out = dropout(softmax(scores(q·kᵀ·scale), over the keys that the mask allows, and the sink))·v

Conventions:

- B batch axes, T queries, S keys, N query heads, K key/value heads, H and Hv features. Query head n
  reads key/value head n // (N/K).
- The score functions change q·kᵀ·scale in order, a bias last. Then the mask hides scores. Functions
  and masks read positions, which need not count from 0.
- A sink is one more score of each head, which takes weight and has no value.
- A fully masked query has the weights, the output and the sum of exponentials 0.
- Dropout sets weights to 0 after the softmax, and scales the others to keep the expectation.
- The computation is in float32, or float64 for float64. Only the output is rounded, to q's dtype.
- Another normalizer takes the place of the softmax. It has no sums.

Inputs are finite here. To a kernel a masked key that is not finite is as if it were absent. Kernels
also differ in their memory, the order of sums, and where they round. Their docstrings say how.
"""

from typing import Any

import jax
import jax.numpy as jnp

from flax_mha.base.shapes import Dims, lead, wide
from flax_mha.kernels.call.normalizers import OTHERS, SOFTMAX
from flax_mha.kernels.call.spec import AttentionSpec, Result, Sums


def attend(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec) -> Result:
    """Compute attention of q [*B, T, N, H] to k [*B, S, K, H] and v [*B, S, K, Hv].

    Returns out [*B, T, N, Hv], and the maximum and sum of exponentials [*B, N, T].
    """
    at, dtype = spec.at(Dims.of(q, k, v)), wide(q.dtype)
    group = q.shape[-2] // k.shape[-2]
    queries, keys, values = (jnp.swapaxes(x.astype(dtype), -3, -2) for x in (q, k, v))
    keys, values = (jnp.repeat(x, group, -3) for x in (keys, values))

    queries = queries * jnp.asarray(spec.scale, dtype)
    s = jnp.matmul(queries, keys.mT, precision=spec.precision)  # [*B, N, T, S]
    s, allowed = spec.apply(s, at, float(jnp.finfo(dtype).min), (queries, keys))

    if spec.normalizer == SOFTMAX:
        weights, sums = softmax(s, allowed, spec.sinks)
    else:
        weights = OTHERS[spec.normalizer](s, allowed, spec.count)
        sums = Sums(jnp.zeros_like(s[..., 0]), jnp.zeros_like(s[..., 0]))

    kept = spec.scale_kept(spec.apply_dropout(weights, at))
    out = jnp.matmul(kept, values, precision=spec.precision)
    return jnp.swapaxes(out, -3, -2).astype(q.dtype), sums


def softmax(
    s: jax.Array, allowed: jax.Array | None, sinks: jax.Array | None
) -> tuple[jax.Array, Sums]:
    """Return the weights [*B, N, T, S] of scores, and their maximum and sum of exponentials."""
    top = jnp.max(s, -1, keepdims=True, initial=jnp.finfo(s.dtype).min)
    sink: Any = None if sinks is None else lead(sinks.astype(s.dtype)[:, None, None], s.ndim)
    # The weights do not depend on what is subtracted.
    top = jax.lax.stop_gradient(top if sink is None else jnp.maximum(top, sink))
    e = jnp.exp(s - top)
    e = e if allowed is None else jnp.where(allowed, e, 0.0)
    total = e.sum(-1, keepdims=True) + (0.0 if sink is None else jnp.exp(sink - top))
    return e / jnp.where(total == 0, 1.0, total), Sums(top[..., 0], total[..., 0])
