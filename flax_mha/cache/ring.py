"""Ring buffers: the token at position p is in slot p mod S, and the last S tokens are held."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha import inputs, masks, shapes
from flax_mha.grid import Grid
from flax_mha.kernels.stored import Stored
from flax_mha.masks.base import Mask
from flax_mha.scores import Bias, ScoreMod

# Beyond the position of any token: that of a slot which holds none, and the length of a row whose
# tokens are lost.
FAR = 2**30


def positions(length: jax.Array, S: int) -> jax.Array:
    """Int32 [*B, S], where the token in each slot stands, FAR where there is none.

    Args:
      length: int32 [*B], tokens so far.
      S: slots.
    """
    slot = shapes.lead(jnp.arange(S, dtype=jnp.int32), length.ndim + 1)
    last = length[..., None] - 1
    # The last of each slot's positions before the length.
    found = last - (last - slot) % S
    return jnp.where(found < 0, FAR, found)


def truncated(
    length: jax.Array, to: jax.Array | int, S: int, window: jax.Array | int | None
) -> jax.Array:
    """Lengths [*B] cut to `to`; FAR where a ring of S slots has overwritten what is needed then."""
    most = inputs.integers("lengths", to)
    if most.shape not in {(), length.shape[-most.ndim or length.ndim :]}:
        raise ValueError(
            f"lengths must be one number or have shape [*B] = {length.shape}, got {most.shape}; "
            f"give one number for each row of the batch"
        )
    most = shapes.lead(jnp.asarray(most), length.ndim)
    new = jnp.minimum(length, jnp.maximum(most, 0))
    if window is None:
        return new
    lost = jnp.maximum(new - window, 0) < jnp.maximum(length - S, 0)
    return jnp.where(lost, FAR, new)


def over_keys(
    q: jax.Array, kv: Sequence[Stored], mask: masks.MaskLike | None, call: dict[str, Any]
) -> list[shapes.Shape]:
    """The shapes over the scores of a call's masks, ids and biases that are arrays of the keys."""
    dims = shapes.attention_dims(q, *(x.replace(dtype=q.dtype) for x in kv))
    scores: Sequence[ScoreMod] = call.get("scores", ())
    if call.get("bias") is not None:
        scores = (*scores, Bias(call["bias"]))
    parts: list[Mask | ScoreMod] = [mod.bind(dims) for mod in scores]
    if mask is not None:
        parts.append(masks.as_mask(mask).bind(dims))
    leaves = jax.tree.leaves(parts, is_leaf=lambda x: isinstance(x, Grid))
    grids = (x.array.shape for x in leaves if isinstance(x, Grid))
    return [shape for shape in grids if shape[-1] > 1]


def check_positional(
    q: jax.Array, kv: Sequence[Stored], mask: masks.MaskLike | None, call: dict[str, Any]
) -> None:
    """In a ring a slot is not a position: arrays along the keys would meet the wrong ones."""
    wrong = over_keys(q, kv, mask, call)
    if wrong:
        raise ValueError(
            f"in a ring buffer slots are not positions, so masks, segment ids and biases that are "
            f"arrays over the keys have no meaning, got one of shape {wrong[0]} over the scores; "
            f"give rules of positions, such as masks.Window, or a cache without a window"
        )
