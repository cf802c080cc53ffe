"""Masks that are equality of ids: segments, lengths, keys or queries that are padding."""

import functools
import operator
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base.coordinates import Array, At, flat_batch
from flax_mha.base.shapes import Dims
from flax_mha.kernels.spec import AttentionSpec
from flax_mha.masks import And, Dense, Lengths, Mask, Segments

# Of the queries, int32 [rows|1, T], and of the keys, [rows|1, S].
Ids: TypeAlias = tuple[jax.Array, jax.Array]


def split(spec: AttentionSpec, dims: Dims) -> tuple[Ids | None, list[Mask]]:
    """The call's mask as ids and other masks: a pair is allowed where all of them say so."""
    ids: Ids | None = None
    queries, keys, rest = [], [], []
    for mask in conjuncts(spec.mask):
        found = _real(mask, spec.at(dims))
        # A subclass may mean something else.
        if type(mask) is Segments:
            other = _rows(mask.q.array, mask.kv.array, dims)
            ids = other if ids is None else _both(ids, other)
        elif found is not None:
            queries += found[0]
            keys += found[1]
        else:
            rest.append(mask)
    if not queries and not keys:
        return ids, rest
    yes = np.ones((1,) * len(dims.logits), bool)
    q, k = (functools.reduce(operator.and_, parts or [yes]) for parts in (queries, keys))
    q, k = (x != 0 for x in _rows(q, k, dims))
    if ids is None:
        return (jnp.where(q, 1, 0), jnp.where(k, 1, 2)), rest
    q_ids = jnp.where(q, ids[0], _free(ids[1]))
    return (q_ids, jnp.where(k, ids[1], _free(q_ids))), rest


def conjuncts(mask: Mask | None) -> list[Mask]:
    """The masks that all have to allow."""
    if mask is None:
        return []
    if type(mask) is And:
        return [part for each in mask.masks for part in conjuncts(each)]
    return [mask]


def _real(mask: Mask, at: At) -> tuple[list[Array], list[Array]] | None:
    """Which queries, and which keys, a mask is about at all; None if it says more than that."""
    if type(mask) is Lengths and mask.kv.array.shape[-2] == 1:
        return [] if mask.q is None else [at.q < mask.q.array], [at.k < mask.kv.array]
    if type(mask) is Dense and mask.array.array.shape[-3:-1] == (1, 1):
        return [], [mask.array.array]
    if type(mask) is Dense and mask.array.array.shape[-3::2] == (1, 1):
        return [mask.array.array], []
    return None


def _rows(q: Array, k: Array, dims: Dims) -> Ids:
    """Of queries [*B|1, 1, T|1, 1] and of keys [*B|1, 1, 1, S|1], int32 [rows|1, T] and [·, S]."""
    q, k = (jnp.asarray(flat_batch(x, dims), jnp.int32)[:, 0] for x in (q, k))
    rows = max(len(q), len(k))
    return (
        jnp.broadcast_to(q[:, :, 0], (rows, dims.T)),
        jnp.broadcast_to(k[:, 0], (rows, dims.S)),
    )


def _free(ids: jax.Array) -> jax.Array:
    """For each row of ids [rows, L] a number that is none of them, [rows, 1]: one of 0 … L."""
    L = ids.shape[1]

    def one(ids: jax.Array) -> jax.Array:
        taken = jnp.zeros(L + 1, bool).at[jnp.where(ids < 0, L + 1, ids)].set(True, mode="drop")
        return jnp.argmin(taken).astype(jnp.int32)[None]

    return jax.vmap(one)(ids)


def _both(one: Ids, other: Ids) -> Ids:
    """Ids that are equal where those of both are: the rank of each pair among all of its row."""
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
