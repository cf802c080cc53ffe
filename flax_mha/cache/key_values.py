"""Keys and values that queries attend to: of a call, a cache, an encoder or another layer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import masks
from flax_mha.base import checks, loops, shapes, symbols
from flax_mha.base.coordinates import Array, is_score_array
from flax_mha.base.trees import Struct
from flax_mha.kernels import dot_product_attention
from flax_mha.kernels.call import stored
from flax_mha.kernels.call.capture import SQUARE
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.masks.algebra import Mask
from flax_mha.scores import Bias, ScoreMod


class KeyValues(Struct):
    """Keys and values that queries attend to, after norms and rotation.

    A layer returns them with `return_kv=True`, and another layer attends to them as its `kv`.

    Attributes:
      key: [*B, S, K, H]; `Stored` if a cache holds them.
      value: [*B, S, K, Hv], likewise.
      lengths: int [*B], the number of filled keys of each row; None if all are, or if causality
        hides the others.
      q_positions: int32 [*B, T], the positions of queries that continue earlier calls; else None.
      k_positions: int32 [*B, S], the positions of keys in a ring buffer; None for 0 … S−1.
      new: a pair of the keys and values of the call's own tokens, if a cache holds more; else None.
      lost: bool [*B, T], True for queries to a cache that miss a key; else None.
      has_slots: True for the slots of a self-attention cache, to which attention is causal.
      window: the number of earlier tokens that a query sees in a ring buffer; else None.
      ordered: True if the call that computed them had an `order`.
    """

    key: Any
    value: Any
    lengths: Any = None
    q_positions: Any = None
    k_positions: Any = None
    new: Any = None
    lost: Any = None
    has_slots: bool = struct.field(pytree_node=False, default=False)
    window: int | None = struct.field(pytree_node=False, default=None)
    ordered: bool = struct.field(pytree_node=False, default=False)

    def own(self) -> tuple[Any, Any]:
        """Return the keys and values of the call's own tokens."""
        return self.new or (self.key, self.value)

    def places(
        self, q: jax.Array, mask: masks.MaskLike | None, lengths: jax.Array | None = None,
        order: Array | None = None, normalizer: str = SOFTMAX,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the mask and positions of a call of `dot_product_attention` to these keys.

        The mask of the call is joined by one of padding and empty slots. `lengths` and `order` are
        as in a layer's call. Normalizers other than the softmax count the visible keys.
        """
        q_positions: Any = order if self.q_positions is None else self.q_positions
        end, filled = lengths, self.lengths
        if end is not None:
            end = shapes.per_row("lengths", end, q.shape[:-3], q.shape[-3])
            if self.q_positions is not None:
                end = self.q_positions[..., 0] + jnp.clip(end, 0, q.shape[-3])
        counts_keys = self.has_slots and normalizer != SOFTMAX
        if filled is None and (end is not None or counts_keys):
            filled = q_positions[..., -1] + 1 if self.has_slots else self.key.shape[-3]
        if filled is not None:
            mask = masks.combine(masks.Lengths(filled, end), mask)
        if self.has_slots:
            causal = masks.Causal() if self.window is None else masks.Window(self.window, 0)
            mask = masks.combine(causal, mask)
        kv_positions = self.k_positions if self.has_slots else order
        return {"mask": mask, "q_positions": q_positions, "kv_positions": kv_positions}

    def attend(
        self, q: jax.Array, attention: Callable[..., Any] = dot_product_attention, *,
        mask: masks.MaskLike | None = None, lengths: jax.Array | None = None,
        order: Array | None = None, **call: Any,
    ) -> Any:  # fmt: skip
        """Attend to slots from queries q [*B, T, N, H]. The output is NaN if they miss a key.

        `attention` is called with the arguments `call`. See `places` for the others.
        """
        *_, T, _, _ = checks.floating("q", q).shape
        if self.window is not None and self._varies_by_key(q, mask, call):
            raise ValueError(
                "in a ring buffer slots are not positions, so masks, segment ids and biases cannot "
                "be arrays over the keys, got one; give rules of positions, such as masks.Window, "
                "or a cache without a window"
            )
        places = self.places(q, mask, lengths, order, call.get("normalizer", SOFTMAX))
        attend = functools.partial(attention, q, self.key, self.value, **places, **call)
        capture = call.get("capture")
        may_skip_slots = (
            not symbols.at_most(T, stored.QUERIES)
            # These results have an axis of slots.
            and not call.get("return_weights")
            and (capture is None or SQUARE.isdisjoint(capture.what))
            # Another function may sow, which `lax.cond` does not allow.
            and attention is dot_product_attention
            and not self._varies_by_key(q, mask, call)
        )
        if may_skip_slots:
            # In an empty cache the positions are static, so that kernels can skip tiles.
            prompt = functools.partial(attention, q, *self.new, mask=places["mask"], **call)
            is_empty = (self.q_positions[..., 0] == 0).all()
            result = loops.cond(is_empty, prompt, attend)
        else:
            result = attend()
        out, *extras = result if isinstance(result, tuple) else (result,)
        out = jnp.where(self.lost[..., None, None], jnp.nan, out)
        return (out, *extras) if isinstance(result, tuple) else out

    def _varies_by_key(
        self, q: jax.Array, mask: masks.MaskLike | None, call: dict[str, Any]
    ) -> bool:
        """Return True if a mask, ids or a bias of the call is an array over the keys."""
        parts: list[Mask | ScoreMod] = [*call.get("scores", ())]
        if call.get("bias") is not None:
            parts.append(Bias(call["bias"]))
        if mask is not None:
            parts.append(masks.as_mask(mask))
        dims = shapes.Dims.of(q, self.key, self.value)
        leaves = jax.tree.leaves([part.bind(dims) for part in parts], is_leaf=is_score_array)
        return any(is_score_array(x) and x.array.shape[-1] > 1 for x in leaves)

    def check(self, mask: masks.MaskLike | None, order: Array | None) -> None:
        """Check that another layer with this mask and order can attend to these keys."""
        if not self.has_slots and self.ordered != (order is not None):
            raise ValueError(
                "order must be given to both layers, the one that returns kv and the one that "
                "takes it, or to none; got it for one"
            )
        lookback = None if mask is None else masks.as_mask(mask).max_lookback()
        if self.window is not None and (lookback is None or lookback > self.window):
            raise ValueError(
                f"kv are from a ring buffer with a window of {self.window}, so this layer's mask "
                f"must see no earlier tokens, got mask={mask}; give masks.Window(W, 0) with W at "
                f"most {self.window}"
            )
