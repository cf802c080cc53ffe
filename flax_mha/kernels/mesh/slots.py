"""Attention to a cache whose slots are sharded: each device attends to its own, and all merge.

With outᵢ, topᵢ and totalᵢ of the slots of device i (see `Sums`), and top = maxᵢ topᵢ:

    cᵢ = totalᵢ·exp(topᵢ − top);   total = Σ cᵢ;   out = Σ cᵢ·outᵢ / total

The devices send B·T·N·(Hv + 2) numbers for a cache of any size.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023, with devices as its parts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha.base import shapes
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.spec import AttentionSpec, Result, Sums
from flax_mha.kernels.xla import softmax


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
    out, own = local(q, k, v, spec.replace(sinks=None))
    top = lax.pmax(lax.stop_gradient(own.top), axes)
    weight = own.total * jnp.exp(own.top - top)
    out, total = lax.psum((out.astype(top.dtype) * shapes.by_query(weight), weight), axes)
    out, sums = out / shapes.by_query(softmax.divisor(total)), Sums(top, total)
    if spec.sinks is not None:
        out, sums = softmax.merge_sinks((out, sums), spec.sinks)
    return out.astype(q.dtype), sums
