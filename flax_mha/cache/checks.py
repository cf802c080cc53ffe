"""What may be given to a cache, and what to give instead."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import inputs
from flax_mha.inputs import Integers
from flax_mha.shapes import Shape


def dtype(name: str, given: Any) -> jnp.dtype:
    """A cache stores floats, or int8 with scales."""
    return inputs.dtype(name, given, "a floating dtype or int8")


def tokens(key: Any, value: Any, held: tuple[Shape, Shape], wraps: bool) -> None:
    """Keys and values of as many tokens, that fit slots of the shapes held."""
    for name, x, (*B, K, S, F) in (("key", key, held[0]), ("value", value, held[1])):
        came = inputs.floating(name, x).shape
        T = came[-3] if len(came) == len(B) + 3 else 0
        if T < 1 or came != (*B, T, K, F) or (not wraps and T > S):
            raise ValueError(
                f"{name}s for the cache must have shape [*B, at most S, K, H] where the cache is "
                f"[*B, K, S, H] = {(*B, K, S, F)}, got {came}; initialize the cache with the full "
                f"batch and length"
            )
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(
            f"keys and values must be of as many tokens, got key {key.shape} and value "
            f"{value.shape}; give every key its value"
        )


def queries(q: Any, T: int) -> None:
    """A query for each of T new tokens."""
    came = inputs.floating("q", q).shape
    if len(came) < 3 or came[-3] != T:
        raise ValueError(
            f"q must have shape [*B, T, N, H] with a query for each of the {T} new tokens, got "
            f"{came}; append tokens without queries by `append`"
        )


def remaining(lengths: Any, batch: Shape) -> Integers:
    """How many tokens of each row to keep, int [] or [*B]; of a scan also for each layer."""
    found = inputs.integers("lengths", lengths)
    if found.shape != batch[len(batch) - found.ndim :]:
        raise ValueError(
            f"lengths must be one number or have shape [*B] = {batch}, got {found.shape}; "
            f"give one number for each row of the batch"
        )
    remedy = "give how many tokens stay, such as length - 1 to take one back"
    inputs.within("lengths", found, None, remedy)
    return found


def rows(indices: Any, batch: Shape) -> Integers:
    """Indices of some rows of the batch (its last axis), int32 [R]."""
    if not batch:
        raise ValueError(
            "fork takes rows of a batch, and this cache has no batch axis; give it one of size 1"
        )
    given = indices if hasattr(indices, "dtype") else [*jax.tree.leaves(indices)]
    if getattr(given, "dtype", None) == np.bool_ or (
        isinstance(given, list) and any(isinstance(x, bool | np.bool_) for x in given)
    ):
        raise TypeError(
            "rows must be indices of rows, got bools; of a mask give np.flatnonzero(mask)"
        )
    found = inputs.integers("rows", indices)
    if found.ndim != 1 or not found.size:
        raise ValueError(
            f"rows must have shape [R], got {found.shape}: at least one index of a row; "
            f"give one row as jnp.array([row])"
        )
    inputs.within("rows", found, batch[-1], "name rows that there are")
    return found
