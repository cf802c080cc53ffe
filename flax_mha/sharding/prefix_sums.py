"""Prefix sums along an axis that devices may share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from flax_mha.sharding import layout, rules


def prefix_sums(
    scan: Callable[..., Any], add: Callable[..., Any], names: rules.LogicalNames, *x: jax.Array
) -> Any:
    """Return scan(*x), the prefix sums along the axis of tokens, by each device on its shard.

    XLA would make it a loop that adds one token a step.

    Args:
      scan: a module's function, or a `Partial` of one, that returns the prefix sums of x along the
        axis of `names` that is "length", in a tree like x.
      add: an associative sum of two such trees, whose identity is 0.
      names: the logical names of the axes of x.
      *x: arrays of one shape.
    """
    axis = x[0].ndim - len(names) + names.index("length")
    devices = rules.unpack_entry(layout.spec(x[0].shape, names)[axis])
    if not devices:
        return scan(*x)
    on_shard = Partial(_on_shard, scan, add, devices, axis)
    return layout.local(on_shard, [names] * len(x), (x[0].shape, names), *x)


def counts(x: jax.Array) -> jax.Array:
    """Return how many of the tokens up to each one are True, int32, for bool [*B, T]."""
    return prefix_sums(_count, jnp.add, ("batch", "length"), x)


def _count(x: jax.Array) -> jax.Array:
    return jnp.cumsum(x, -1, dtype=jnp.int32)


def _on_shard(
    scan: Callable[..., Any], add: Callable[..., Any], devices: tuple[str, ...], axis: int,
    *x: jax.Array,
) -> Any:  # fmt: skip
    sums, me = scan(*x), lax.axis_index(devices)

    def gather(x: jax.Array) -> jax.Array:
        return lax.all_gather(jnp.take(x, jnp.array([-1]), axis), devices, axis=axis, tiled=True)

    def pick(totals: jax.Array) -> jax.Array:
        earlier = jnp.take(totals, jnp.maximum(me - 1, 0)[None], axis)
        return jnp.where(me == 0, 0, earlier)

    totals = scan(*jax.tree.leaves(jax.tree.map(gather, sums)))
    return add(jax.tree.map(pick, totals), sums)
