"""Checks, parts of masks, and a change of the output, which several variants share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha.base.coordinates import Array, At, map_score_arrays, whole
from flax_mha.base.shapes import Dims
from flax_mha.cache.resolve import CacheLike, has_own_keys
from flax_mha.kernels import dot_product_attention
from flax_mha.masks.algebra import Mask, evaluate, resolve


def check(what: str, layer: Any, absent: tuple[str, ...], learns_scale: bool = False) -> None:
    """Refuse the fields `absent`, and a learned scale unless the variant has one."""
    if isinstance(layer.scale, str) and not learns_scale:
        raise ValueError(
            f"scale must be a number in {what}, got {layer.scale!r}; leave it out, or give a number"
        )
    for name in absent:
        if getattr(layer, "custom_attention" if name == "attention_fn" else name):
            raise ValueError(f"{what} has no {name}, got {getattr(layer, name)!r}; leave it out")


def check_inputs(what: str, x_k: jax.Array | None, cache: CacheLike) -> None:
    """Check that keys and values are of the inputs of the queries."""
    if x_k is not None or has_own_keys(cache):
        raise ValueError(f"{what} is self-attention, got inputs_k or kv; leave it out")


def attend(change: Callable[[jax.Array], jax.Array], q: Any, k: Any, v: Any, **call: Any) -> Any:
    """Return `dot_product_attention`, its output after `change`."""
    result = dot_product_attention(q, k, v, **call)
    out, *more = result if isinstance(result, tuple) else (result,)
    return (change(out), *more) if more else change(out)


def allowed(mask: Mask, at: At, q: Array, k: Array | None = None) -> Array:
    """Evaluate a bound mask for queries q [n] and keys k [m]: bool [*B|1, N|1, n|1, m|1].

    `at` has the coordinates of all scores. An index beyond the last query is the last.
    """

    def pick(x: Array) -> Array:
        x = x if x.shape[-2] == 1 else jnp.take(x, q, -2, mode="clip")
        return x if k is None or x.shape[-1] == 1 else jnp.take(x, k, -1, mode="clip")

    return evaluate(map_score_arrays(pick, mask), at._replace(q=pick(at.q), k=pick(at.k)))


def sees_itself(mask: Mask, dims: Dims, positions: Array | None, cached: bool) -> Array:
    """Evaluate a mask for each query and the key of its own token: bool [*B|1, N|1, T].

    `positions` [T] or [*B, T] default to 0 … T−1. If `cached`, key j is the slot of position j.
    """
    at = whole(dims, positions)
    at = at._replace(k=at.q)
    index = jnp.asarray(at.q if cached else whole(dims).q)

    def own(x: Array) -> Array:
        return x if x.shape[-1] == 1 else jnp.take_along_axis(x, index, -1, mode="clip")

    return evaluate(map_score_arrays(own, resolve(mask.bind(dims), at)), at)[..., 0]
