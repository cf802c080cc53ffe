"""Attention to a cache whose slots are sharded: each device attends to its own, and all merge.

With outᵢ and lseᵢ of the slots of device i, and m = maxᵢ lseᵢ:

    total = Σ exp(lseᵢ − m);   out = Σ exp(lseᵢ − m)·outᵢ / total;   lse = m + log(total)

The devices send B·T·N·(Hv + 2) numbers, whatever the size of the cache.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023, whose parts are devices here.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha.base import shapes
from flax_mha.kernels import softmax
from flax_mha.kernels.normalizers import SOFTMAX
from flax_mha.kernels.spec import AttentionSpec, Result


def attend(
    axes: Any, local: Callable[..., Result], q: jax.Array, k: Any, v: Any, spec: AttentionSpec
) -> Result:
    """Attend to the slots of all devices along mesh axes, inside `jax.shard_map`.

    `local` attends from q to this device's slots k and v. The spec is that of these slots.
    """
    if spec.normalizer != SOFTMAX:
        raise ValueError(
            f"normalizer must be 'softmax' to merge the slots of several devices, got "
            f"{spec.normalizer!r}; leave out the rule for 'cache_length'"
        )
    out, lse = local(q, k, v, spec.replace(sinks=None))
    own_top, weight = softmax.split_lse(lse)
    top = lax.pmax(lax.stop_gradient(own_top), axes)
    weight *= jnp.exp(own_top - top)
    out, total = lax.psum((out.astype(lse.dtype) * shapes.by_query(weight), weight), axes)
    if spec.sinks is not None:
        before, sinks = top, shapes.lead(spec.sinks.astype(lse.dtype)[:, None], lse.ndim)
        top, total = softmax.add_sink(sinks, top, total)
        out *= shapes.by_query(jnp.exp(before - top))
    divisor, lse = softmax.finish(top, total)
    return (out / shapes.by_query(divisor)).astype(q.dtype), softmax.minus_infinity(lse)
