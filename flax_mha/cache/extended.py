"""Attention to the tokens of a cache and new tokens, with NaN for tokens that found no slot."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import masks
from flax_mha.base import checks, loops, shapes, symbols
from flax_mha.base.coordinates import ScoreArray
from flax_mha.base.trees import Struct
from flax_mha.cache.sources import Shared
from flax_mha.kernels import dot_product_attention
from flax_mha.kernels.call import stored
from flax_mha.kernels.call.capture import SQUARE, as_capture
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.stored import Stored
from flax_mha.masks.algebra import Mask
from flax_mha.scores import Bias, ScoreMod


class Extended(Shared, Struct):
    """The keys and values that the queries of T new tokens attend to: cached and new tokens.

    Attributes:
      key: the keys of all visible tokens, [*B, S, K, H].
      value: the values, [*B, S, K, Hv].
      new: the keys and values of the new tokens alone.
      q_positions: the positions of the new tokens, int32 [*B, T].
      k_positions: the positions of all keys, int32 [*B, S]; None if slot j holds position j.
      end: the length of each row after the new tokens, int32 [*B].
      lost: bool [*B, T], True for new tokens that found no slot.
      ragged: True if the call had `lengths`.
      window: the number of earlier tokens that a token sees; None for all.
    """

    key: Stored
    value: Stored
    new: tuple[Stored, Stored]
    q_positions: jax.Array
    k_positions: jax.Array | None
    end: jax.Array
    lost: jax.Array
    ragged: bool = struct.field(pytree_node=False)
    window: int | None = struct.field(pytree_node=False)
    has_slots = True

    def own(self) -> tuple[Stored, Stored]:
        """Return the keys and values of the new tokens."""
        return self.new

    def attend(
        self, q: jax.Array, *, mask: masks.MaskLike | None = None, lengths: jax.Array | None = None,
        **call: Any,
    ) -> Any:  # fmt: skip
        """Attend from queries q [*B, T, N, H] of the new tokens, the first `lengths` of each row.

        See `KVCache.extend` for the other arguments.
        """
        T = self.q_positions.shape[-1]
        shape = checks.floating("q", q).shape
        if len(shape) < 3 or shape[-3] != T:
            raise ValueError(
                f"q must have shape [*B, T, N, H] with a query for each of the {T} new tokens, got "
                f"{shape}; append tokens without queries by `append`"
            )
        before, end = self.q_positions[..., 0], self.end
        if lengths is not None:
            end = before + jnp.clip(shapes.per_row("lengths", lengths, end.shape, T), 0, T)
        if self.ragged or lengths is not None:
            mask = masks.combine(masks.Lengths(self.end, end), mask)
        kv = (self.key, self.value)
        attend_prompt = functools.partial(
            attend_causally, q, self.new, mask, call, self.window, self.end
        )
        attend_cache = functools.partial(
            attend_causally, q, kv, mask, call, self.window, self.end,
            q_positions=self.q_positions, kv_positions=self.k_positions,
        )  # fmt: skip
        capture = as_capture(call.get("capture"))
        # These have an axis of slots. `attention` may sow, which `lax.cond` does not allow.
        has_slots = capture is not None and not SQUARE.isdisjoint(capture.what)
        needs_cache = has_slots or call.get("return_weights", False) is True or "attention" in call
        if symbols.at_most(T, stored.QUERIES) or needs_cache or key_arrays(q, kv, mask, call):
            result = attend_cache()
        else:
            # In an empty cache the positions are static, so that kernels can skip tiles.
            result = loops.cond((before == 0).all(), attend_prompt, attend_cache)
        return nan_where_lost(result, self.lost)


def attend_causally(
    q: jax.Array, kv: tuple[Stored, Stored], mask: masks.MaskLike | None, call: dict[str, Any],
    window: int | None, length: jax.Array, **positions: Any,
) -> Any:  # fmt: skip
    """Attend under causality, or under the window of a ring buffer, combined with the mask.

    `length` is the number of tokens of each row, int [*B]. `call` holds other arguments of
    `dot_product_attention`, or an `attention` to call instead.
    """
    if window is not None and (shapes_over_keys := key_arrays(q, kv, mask, call)):
        raise ValueError(
            f"in a ring buffer slots are not positions, so masks, segment ids and biases cannot be "
            f"arrays over the keys, got one of shape {shapes_over_keys[0]} over the scores; "
            f"give rules of positions, such as masks.Window, or a cache without a window"
        )
    if call.get("normalizer", SOFTMAX) != SOFTMAX:
        # It counts keys, and causality does not tell how many slots are empty.
        mask = masks.combine(masks.Lengths(length), mask)
    # Causality also hides empty slots.
    causal = masks.Causal() if window is None else masks.Window(window, 0)
    call = positions | call
    attention = call.pop("attention", dot_product_attention)
    return attention(q, *kv, mask=masks.combine(causal, mask), **call)


def nan_where_lost(result: Any, lost: jax.Array) -> Any:
    """Set the output of lost queries [*B, T] to NaN. Earlier tokens of the row stay valid."""
    out, *extras = result if isinstance(result, tuple) else (result,)
    out = jnp.where(lost[..., None, None], jnp.nan, out)
    return (out, *extras) if isinstance(result, tuple) else out


def key_arrays(
    q: jax.Array, kv: Sequence[Stored], mask: masks.MaskLike | None, call: dict[str, Any]
) -> list[shapes.Shape]:
    """Return the shapes over the scores of masks, ids and biases that are arrays over the keys."""
    parts: list[Mask | ScoreMod] = [*call.get("scores", ())]
    if call.get("bias") is not None:
        parts.append(Bias(call["bias"]))
    if mask is not None:
        parts.append(masks.as_mask(mask))
    dims = shapes.Dims.of(q, *kv)
    bound = [part.bind(dims) for part in parts]
    leaves = jax.tree.leaves(bound, is_leaf=lambda x: isinstance(x, ScoreArray))
    return [x.array.shape for x in leaves if isinstance(x, ScoreArray) and x.array.shape[-1] > 1]
