"""Attention to what a cache holds."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import masks, shapes
from flax_mha.cache import checks
from flax_mha.grid import Grid
from flax_mha.kernels import decode, dot_product_attention, observe
from flax_mha.kernels.stored import Stored
from flax_mha.masks.base import Mask
from flax_mha.scores import Bias, ScoreMod


class Extended(struct.PyTreeNode):
    """The tokens of a cache and T new ones: what queries of the new ones attend to.

    Attributes:
      key: of all that they see, [*B, S, K, H].
      value: [*B, S, K, Hv].
      new: keys and values of the new tokens alone.
      q_positions: int32 [*B, T], where the new tokens stand.
      k_positions: int32 [*B, S], where all stand; None for slot j at position j.
      end: int32 [*B], how many tokens each row has by now.
      first: bool, whether there were none before.
      lost: bool [*B, T], tokens that found no slot.
      ragged: whether rows had `lengths`.
      window: how many tokens before itself a token sees; None for all.
    """

    key: Stored
    value: Stored
    new: tuple[Stored, Stored]
    q_positions: jax.Array
    k_positions: jax.Array | None
    end: jax.Array
    first: jax.Array
    lost: jax.Array
    ragged: bool = struct.field(pytree_node=False)
    window: int | None = struct.field(pytree_node=False)

    def attend(
        self, q: jax.Array, *, mask: masks.MaskLike | None = None, lengths: jax.Array | None = None,
        order: Any = None, **call: Any,
    ) -> Any:  # fmt: skip
        """Attends from queries [*B, T, N, H] of the new tokens, the first `lengths` of each row.

        The rest is as in `KVCache.extend`.
        """
        del order  # There is none in decoding.
        T = self.q_positions.shape[-1]
        checks.queries(q, T)
        if lengths is not None:
            lengths = shapes.per_row("lengths", lengths, self.end.shape, T)
            end = self.q_positions[..., 0] + jnp.clip(lengths, 0, T)
            mask = masks.combine(masks.Lengths(self.end, end), mask)
        elif self.ragged:
            mask = masks.combine(masks.Lengths(self.end, self.end), mask)
        held = (self.key, self.value)

        def first() -> Any:
            return look(q, self.new, mask, call, self.window)

        def later() -> Any:
            places = {"q_positions": self.q_positions, "kv_positions": self.k_positions}
            return look(q, held, mask, call, self.window, **places)

        captured = observe.as_capture(call.get("capture"))
        weights = call.get("return_weights", False) is True
        weights = weights or (captured is not None and "weights" in captured.what)
        weights = weights or "attention" in call  # Which may sow, in no branch.
        if T <= decode.QUERIES or weights or over_keys(q, held, mask, call):
            result = later()
        else:
            # Of a first prompt kernels know before tracing which tokens see which.
            result = jax.lax.cond(self.first, first, later)
        return marked(result, self.lost)


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
