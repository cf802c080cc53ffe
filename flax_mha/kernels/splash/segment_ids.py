"""Masks as segment ids: a query sees the keys with its id."""

import functools
import operator
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base.coordinates import Array, At, flat_batch
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.mask_parts import MaskParts

# Ids of queries, int32 [rows|1, T], and of keys, [rows|1, S].
Ids: TypeAlias = tuple[jax.Array, jax.Array]


def merge_ids(parts: MaskParts, at: At, dims: Dims) -> Ids | None:
    """Return ids that are equal where segments, lengths, and tables of keys or queries allow."""
    ids = [_flatten_ids(mask.q.array, mask.kv.array, dims) for mask in parts.segments]
    queries = [mask.array.array for mask in parts.queries]
    queries += [at.q < mask.q.array for mask in parts.lengths if mask.q is not None]
    keys = [mask.array.array for mask in parts.keys]
    keys += [at.k < mask.kv.array for mask in parts.lengths]
    if queries or keys:
        true = np.ones((1,) * len(dims.logits), bool)
        q, k = (functools.reduce(operator.and_, tables or [true]) for tables in (queries, keys))
        q, k = _flatten_ids(q, k, dims)
        ids.append((jnp.where(q != 0, 1, 0), jnp.where(k != 0, 1, 2)))
    return functools.reduce(_combine_ids, ids) if ids else None


def _flatten_ids(q: Array, k: Array, dims: Dims) -> Ids:
    """Return q [*B|1, 1, T|1, 1] as int32 [rows|1, T], and k [*B|1, 1, 1, S|1] as [rows|1, S]."""
    q, k = (jnp.asarray(flat_batch(x, dims), jnp.int32)[:, 0] for x in (q, k))
    rows = max(len(q), len(k))
    return (
        jnp.broadcast_to(q[:, :, 0], (rows, dims.T)),
        jnp.broadcast_to(k[:, 0], (rows, dims.S)),
    )


def _combine_ids(one: Ids, other: Ids) -> Ids:
    """Return ids that are equal where both are equal: the rank of each pair in its row."""
    T = one[0].shape[1]
    x, y = (jnp.concatenate(ids, 1) for ids in (one, other))
    rows = max(len(x), len(y))
    x, y = (jnp.broadcast_to(ids, (rows, ids.shape[1])) for ids in (x, y))
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    x, y, index = jax.lax.sort((x, y, index), dimension=1, num_keys=2)
    new = (x[:, 1:] != x[:, :-1]) | (y[:, 1:] != y[:, :-1])
    rank = jnp.pad(jnp.cumsum(new, 1, jnp.int32), ((0, 0), (1, 0)))
    _, rank = jax.lax.sort((index, rank), dimension=1)
    return rank[:, :T], rank[:, T:]
