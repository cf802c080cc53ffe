"""Exchanges of tokens among devices that shard both tokens and experts.

Tokens go to the devices of their experts, and the experts' outputs come back. No token is dropped.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha import sharding
from flax_mha.sharding.shard_map import vary

# XLA has `jax.lax.ragged_all_to_all` for TPUs, not for CPUs, and with open errors for GPUs.
SENDING = ("tpu",)

# The weighted sum [n, D] of this device's experts, for tokens [n, D], the ids [n, top_k] of their
# experts among all devices' and the weights of these.
Compute: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def exchanged(
    compute: Compute, axes: tuple[str, ...], experts: tuple[str, ...], num_experts: int,
    x: jax.Array, ids: jax.Array, p: jax.Array,
) -> jax.Array:  # fmt: skip
    """Return compute(x, ids, p), where other devices compute their terms of each token's sum.

    Tokens are sent to their experts if the platform can and that takes fewer bytes. Otherwise each
    device gathers all tokens, and the sums are scattered.

    Args:
      compute: the computation of this device's experts.
      axes: the mesh axes that shard tokens, and experts or hidden features.
      experts: the mesh axes that shard the experts.
      num_experts: E, the number of experts on all devices.
      x: [n, D], this device's tokens.
      ids: [n, top_k], their experts.
      p: [n, top_k], the weights of these.
    """
    can_send = sharding.platform() in SENDING and axes == experts
    if can_send and ids.shape[1] < lax.axis_size(axes):
        return _send(compute, axes, num_experts, x, ids, p)
    tokens = (lax.all_gather(array, axes, tiled=True) for array in (x, ids, p))
    return lax.psum_scatter(compute(*tokens), axes, tiled=True)


def _send(
    compute: Compute, axes: tuple[str, ...], num_experts: int, x: jax.Array, ids: jax.Array,
    p: jax.Array,
) -> jax.Array:  # fmt: skip
    """Send a copy of each token to each of its experts, by `jax.lax.ragged_all_to_all`."""
    devices, me = lax.axis_size(axes), lax.axis_index(axes)
    flat, n_local = ids.reshape(-1), num_experts // devices
    order = jnp.argsort(flat)
    rows = x[order // ids.shape[1]]
    # Copies by [sender, receiver, expert of the receiver].
    counts = jnp.bincount(flat, length=num_experts).reshape(devices, n_local)
    counts = lax.all_gather(counts, axes)
    sizes = counts.sum(-1)
    at_sender, at_receiver = (jnp.cumsum(sizes, axis) - sizes for axis in (1, 0))
    send = functools.partial(lax.ragged_all_to_all, axis_name=axes)

    size = devices * len(x) * min(ids.shape[1], n_local)  # if all tokens choose these experts
    buffer = vary(jnp.zeros((size, x.shape[1]), x.dtype), rows)
    received = send(rows, buffer, at_sender[me], sizes[me], at_receiver[me], sizes[:, me])
    # Each sender's copies are sorted by expert.
    experts = jnp.tile(me * n_local + jnp.arange(n_local), devices)
    experts = jnp.repeat(experts, counts[:, me].reshape(-1), total_repeat_length=size)
    experts = jnp.where(jnp.arange(size) < sizes[:, me].sum(), experts, num_experts)
    y = compute(received, experts[:, None], jnp.ones((size, 1), p.dtype)).astype(x.dtype)

    y = send(y, jnp.zeros_like(rows), at_receiver[:, me], sizes[:, me], at_sender[:, me], sizes[me])
    return weighted_sum(y, order, p)


def weighted_sum(y: jax.Array, order: jax.Array, p: jax.Array) -> jax.Array:
    """Return the sums [n, D] of outputs [n·top_k, D] in an order, times p [n, top_k]."""
    y = y[jnp.argsort(order)].reshape(*p.shape, -1)
    return jnp.sum(y.astype(p.dtype) * p[..., None], 1)
