"""Attention to what a cache holds."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha import masks, shapes
from flax_mha.grid import Grid
from flax_mha.kernels import dot_product_attention
from flax_mha.kernels.stored import Stored
from flax_mha.masks.base import Mask
from flax_mha.scores import Bias, ScoreMod


def look(
    q: jax.Array, kv: tuple[Stored, Stored], mask: masks.MaskLike | None, call: dict[str, Any],
    window: int | None, **positions: Any,
) -> Any:  # fmt: skip
    """What `dot_product_attention` returns under causality, or the window of a ring.

    Of a call that has `attention`, what that returns in its place.
    """
    if window is not None:
        _check_positional(q, kv, mask, call)
    # Causality also hides the slots that hold nothing.
    own = masks.Causal() if window is None else masks.Window(window, 0)
    call = positions | call
    attention = call.pop("attention", dot_product_attention)
    return attention(q, *kv, mask=masks.combine(own, mask), **call)


def marked(result: Any, lost: jax.Array) -> Any:
    """The result with NaN for lost queries [*B, T].

    Not for whole rows: later layers keep what they make of the tokens before those.
    """
    out, *more = result if isinstance(result, tuple) else (result,)
    out = jnp.where(lost[..., None, None], jnp.nan, out)
    return (out, *more) if isinstance(result, tuple) else out


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


def _check_positional(
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
