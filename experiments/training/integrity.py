"""Checksums of arrays, which are the same on every mesh and number of processes.

    c = Σ_i mix(w_i ⊕ mix(i·φ + s))  mod 2³²,  for two seeds s

over the bits w_i of the elements, as unsigned words, and their indices i. mix is a bijection, so
that one changed element changes the sum for certain, and the order of the sum does not matter: each
device adds up its shard.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

_SEEDS = (0x243F6A88, 0x85A308D3)  # digits of π


class Sums(NamedTuple):
    """What is known of the arrays of a tree.

    Attributes:
      arrays: sixteen hexadecimal digits, dtype and shape of each, by path.
      not_finite: the paths of those that are not finite everywhere.
    """

    arrays: dict[str, str]
    not_finite: list[str]


def checksums(tree: Any) -> Sums:
    """The sums of arrays that lie on any mesh."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    found = jax.device_get([_on_mesh(x.sharding)(x) for x in named.values()])
    sums = dict(zip(named, found, strict=True))
    return Sums(
        {name: f"{c[0]:08x}{c[1]:08x} {described(named[name])}" for name, c in sums.items()},
        [name for name, c in sums.items() if not c[2]],
    )


def descriptions(tree: Any) -> dict[str, str]:
    """Dtype and shape of each array, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): described(x) for path, x in leaves
    }


def described(x: Any) -> str:
    """Dtype and shape of an array."""
    return f"{x.dtype}{list(x.shape)}"


def digest(value: Any) -> str:
    """The SHA-256 of what JSON says of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def checksum(x: jax.Array) -> jax.Array:
    """The two sums c of an array's elements, and whether all are finite: uint32 [3]. Traced."""
    words = _words(x)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        stride = np.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
    place = index * np.uint32(0x9E3779B9)
    lanes = [jnp.sum(_mix(words ^ _mix(place + np.uint32(s))), dtype=jnp.uint32) for s in _SEEDS]
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    finite = jnp.isfinite(x).all() if inexact else jnp.bool_(True)
    return jnp.stack([*lanes, finite.astype(jnp.uint32)])


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element as uint32; of wide ones several, along another axis."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    narrow = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, narrow).astype(jnp.uint32)


def _mix(h: jax.Array) -> jax.Array:
    """Murmur3's finalizer, a bijection of 32 bits. Source: Appleby, "SMHasher", 2011."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


@functools.cache
def _on_mesh(sharding: Any) -> Callable[[jax.Array], jax.Array]:
    """One small program for each shape, whose result all processes have."""
    meshed = isinstance(sharding, NamedSharding)
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if meshed else None
    return jax.jit(checksum, out_shardings=everywhere)
