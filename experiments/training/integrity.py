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
# Elements. Of so few it takes less time to fetch them than to compile a program for their shape.
_SMALL = 2**18


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
    found = jax.device_get([_of(x) for x in named.values()])
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
    x = _plain(x)
    narrow = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    words = x if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, narrow)
    return _sums(jnp, x, words)


@np.errstate(over="ignore")  # Words of no axis are scalars to NumPy, which warns of them.
def _on_host(x: jax.Array) -> Any:
    """The same, with nothing to compile."""
    values = np.asarray(_plain(x))
    if values.dtype == np.bool_:
        return _sums(np, values, values)
    size = values.dtype.itemsize
    words = np.ascontiguousarray(values).reshape(-1).view(f"u{min(size, 4)}")
    return _sums(np, values, words.reshape((*values.shape, size // 4)[: values.ndim + (size > 4)]))


def _sums(xp: Any, x: Any, words: Any) -> Any:
    """Of an array whose bits are these words: of wide elements several, along another axis."""
    words = words.astype(np.uint32)
    index = xp.zeros(words.shape, np.uint32)
    for axis, length in enumerate(words.shape):
        stride = np.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        along = [length if other == axis else 1 for other in range(words.ndim)]
        index += (xp.arange(length, dtype=np.uint32) * stride).reshape(along)
    place = index * np.uint32(0x9E3779B9)
    lanes = [xp.sum(_mix(words ^ _mix(place + np.uint32(s))), dtype=np.uint32) for s in _SEEDS]
    finite = xp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else np.bool_(True)
    return xp.stack([*lanes, finite.astype(np.uint32)])


def _plain(x: jax.Array) -> jax.Array:
    """An array of numbers: the words of keys, the parts of complex ones."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([x.real, x.imag], -1)
    return x


def _mix(h: jax.Array) -> jax.Array:
    """Murmur3's finalizer, a bijection of 32 bits. Source: Appleby, "SMHasher", 2011."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def _of(x: jax.Array) -> Any:
    small = x.size <= _SMALL and x.is_fully_addressable
    return _on_host(x) if small else _on_mesh(x.sharding)(x)


@functools.cache
def _on_mesh(sharding: Any) -> Callable[[jax.Array], jax.Array]:
    """One small program for each shape, whose result all processes have."""
    meshed = isinstance(sharding, NamedSharding)
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if meshed else None
    return jax.jit(checksum, out_shardings=everywhere)
