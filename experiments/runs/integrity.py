"""Checksums of arrays, which are the same on every mesh and number of processes.

    c = Σ_i mix(w_i ⊕ mix(i·φ + s))  mod 2³²,  for two seeds s

over the bits w_i of the elements, as unsigned words, and their indices i. mix is a bijection, so
that one changed element changes the sum for certain. The order of the sum does not matter: each
process adds up the shards that it has, and the processes' sums are added on the host. No program
that is compiled for this talks to another device, so that none can wait for one.
"""

import functools
import hashlib
import json
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

_SEEDS = (0x243F6A88, 0x85A308D3)  # digits of π
# Elements. To fetch this few takes less time than to compile a program for their shape.
_SMALL = 2**18


class Sums(NamedTuple):
    """The checksums of a tree of arrays.

    Attributes:
      arrays: sixteen hexadecimal digits, dtype and shape of each, by path.
      not_finite: the paths of arrays with an element that is not finite.
    """

    arrays: dict[str, str]
    not_finite: list[str]


def checksums(tree: Any) -> Sums:
    """Return the sums of arrays on any mesh. All processes call this together."""
    leaves = _by_path(tree)
    # The two sums of each array, and the number of its shards with an element not finite.
    shards = [[checksum(shard, x.shape) for shard in _shards(x)] for x in leaves.values()]
    zero = np.zeros(3, np.uint32)
    rows = [np.sum([zero, *each], 0, np.uint32) for each in jax.device_get(shards)]
    sums = np.stack([zero, *rows])[1:]
    if jax.process_count() > 1:
        sums = multihost_utils.process_allgather(sums).sum(0, dtype=np.uint32)
    of_path = dict(zip(leaves, sums.tolist(), strict=True))
    return Sums(
        {path: f"{a:08x}{b:08x} {describe(leaves[path])}" for path, (a, b, _) in of_path.items()},
        [path for path, (*_, bad) in of_path.items() if bad],
    )


def descriptions(tree: Any) -> dict[str, str]:
    """Return dtype and shape of each array, by path."""
    return {path: describe(x) for path, x in _by_path(tree).items()}


def describe(x: Any) -> str:
    """Return dtype and shape of an array as text."""
    return f"{x.dtype}{list(x.shape)}"


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def _shards(x: jax.Array) -> list[Any]:
    """Return this process's shards of an array, each element in one shard of one process."""
    return [shard for shard in x.addressable_shards if shard.replica_id == 0]


def checksum(shard: Any, shape: tuple[int, ...]) -> Any:
    """Return the two sums of a shard, and 1 if an element is not finite: uint32 [3].

    Args:
      shard: a `jax.Shard`.
      shape: of the whole array.
    """
    start = np.array([index.start or 0 for index in shard.index], np.uint32)
    sums = _on_host if shard.data.size <= _SMALL else _on_device
    return sums(shard.data, start, shape)


@functools.partial(jax.jit, static_argnames="shape")
def _on_device(x: jax.Array, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = _plain(x)
    narrow = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    words = x if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, narrow)
    return _sums(jnp, x, words, start, shape)


@np.errstate(over="ignore")  # Words of no axis are scalars to NumPy, which warns of them.
def _on_host(x: jax.Array, start: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    values = np.asarray(_plain(x))
    words, size = values, values.dtype.itemsize
    if values.dtype != np.bool_:
        words = np.ascontiguousarray(values).reshape(-1).view(f"u{min(size, 4)}")
        words = words.reshape((*values.shape, size // 4)[: values.ndim + (size > 4)])
    sums: np.ndarray = _sums(np, values, words, start, shape)
    return sums


def _sums(xp: Any, x: Any, words: Any, start: Any, shape: tuple[int, ...]) -> Any:
    """Return the sums of a shard with these words, several of a wide element on a last axis."""
    words = words.astype(np.uint32)
    whole = (*shape, *words.shape[len(shape) :])
    index = xp.zeros(words.shape, np.uint32)
    for axis, length in enumerate(words.shape):
        stride = np.uint32(math.prod(whole[axis + 1 :]) % 2**32)
        first = start[axis] if axis < len(shape) else np.uint32(0)
        along = [length if other == axis else 1 for other in range(words.ndim)]
        index += ((xp.arange(length, dtype=np.uint32) + first) * stride).reshape(along)
    place = index * np.uint32(0x9E3779B9)
    lanes = [xp.sum(_mix(words ^ _mix(place + np.uint32(s))), dtype=np.uint32) for s in _SEEDS]
    finite = xp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else np.bool_(True)
    return xp.stack([*lanes, (~finite).astype(np.uint32)])


def _plain(x: jax.Array) -> jax.Array:
    """Return an array of numbers: the words of keys, the parts of complex ones."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([x.real, x.imag], -1)
    return x


def _mix(h: jax.Array) -> jax.Array:
    """Return Murmur3's finalizer, a bijection of 32 bits.

    Source: Appleby, "SMHasher", 2011.
    """
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))
