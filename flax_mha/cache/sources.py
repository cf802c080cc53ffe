"""Keys and values that one layer gives, and others attend to."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import masks
from flax_mha.base import checks, shapes, symbols
from flax_mha.base.arguments import check_known
from flax_mha.base.coordinates import Array, ScoreArray
from flax_mha.kernels import ARGUMENTS, decode, dot_product_attention, observe
from flax_mha.kernels.stored import Stored
from flax_mha.masks.base import Mask
from flax_mha.scores import Bias, ScoreMod

# What may be said of a call: `attention` is called in place of `dot_product_attention`.
_ARGUMENTS = ARGUMENTS | {"attention"}


class Extended(struct.PyTreeNode):
    """The tokens of a cache and T new ones: what queries of the new ones attend to.

    Attributes:
      key: of all that they see, [*B, S, K, H].
      value: [*B, S, K, Hv].
      new: keys and values of the new tokens alone.
      q_positions: int32 [*B, T], where the new tokens stand.
      k_positions: int32 [*B, S], where all stand; None for slot j at position j.
      end: int32 [*B], how many tokens each row has by now.
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
        came = checks.floating("q", q).shape
        if len(came) < 3 or came[-3] != T:
            raise ValueError(
                f"q must have shape [*B, T, N, H] with a query for each of the {T} new tokens, got "
                f"{came}; append tokens without queries by `append`"
            )
        before, end = self.q_positions[..., 0], self.end
        if lengths is not None:
            end = before + jnp.clip(shapes.per_row("lengths", lengths, end.shape, T), 0, T)
        if self.ragged or lengths is not None:
            mask = masks.combine(masks.Lengths(self.end, end), mask)
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
        if symbols.at_most(T, decode.QUERIES) or weights or over_keys(q, held, mask, call):
            result = later()
        else:
            # Of a first prompt kernels know before tracing which tokens see which.
            result = jax.lax.cond((before == 0).all(), first, later)
        return marked(result, self.lost)


def look(
    q: jax.Array, kv: tuple[Stored, Stored], mask: masks.MaskLike | None, call: dict[str, Any],
    window: int | None, **positions: Any,
) -> Any:  # fmt: skip
    """What `dot_product_attention` returns under causality, or the window of a ring.

    Of a call that has `attention`, what that returns in its place.
    """
    check_known("attention to a cache", call, _ARGUMENTS)
    if window is not None and (wrong := over_keys(q, kv, mask, call)):
        raise ValueError(
            f"in a ring buffer slots are not positions, so masks, segment ids and biases that are "
            f"arrays over the keys have no meaning, got one of shape {wrong[0]} over the scores; "
            f"give rules of positions, such as masks.Window, or a cache without a window"
        )
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
    parts: list[Mask | ScoreMod] = [*call.get("scores", ())]
    if call.get("bias") is not None:
        parts.append(Bias(call["bias"]))
    if mask is not None:
        parts.append(masks.as_mask(mask))
    dims = shapes.attention_dims(q, *kv)
    bound = [part.bind(dims) for part in parts]
    leaves = jax.tree.leaves(bound, is_leaf=lambda x: isinstance(x, ScoreArray))
    return [x.array.shape for x in leaves if isinstance(x, ScoreArray) and x.array.shape[-1] > 1]


class KV(struct.PyTreeNode):
    """Keys and values of one call of a layer, as it attends to them: after norms and rotary.

    Attributes:
      key: [*B, S, K, H].
      value: [*B, S, K, Hv].
      lengths: int [*B], how many tokens of each row are real; None for all.
      ordered: whether the call had an `order`.
    """

    key: Any
    value: Any
    lengths: jax.Array | None = None
    ordered: bool = struct.field(pytree_node=False, default=False)

    def attend(
        self, q: jax.Array, *, mask: masks.MaskLike | None = None, lengths: jax.Array | None = None,
        order: Array | None = None, attention: Any = dot_product_attention, **call: Any,
    ) -> Any:  # fmt: skip
        """What `dot_product_attention` gives for queries [*B, T, N, H], `lengths` of them real."""

        def real(lengths: jax.Array | None, x: Any) -> jax.Array:
            batch, length = q.shape[:-3], x.shape[-3]
            if lengths is None:
                return jnp.full(batch, length)
            return shapes.per_row("lengths", lengths, batch, length)

        if self.lengths is not None or lengths is not None:
            both = real(self.lengths, self.key), real(lengths, q)
            mask = masks.combine(mask, masks.Lengths(*both))
        return attention(
            q, self.key, self.value, mask=mask, **call, q_positions=order, kv_positions=order
        )


# Of a layer that decodes, with the tokens that its cache holds.
Shared: TypeAlias = KV | Extended
Given: TypeAlias = Shared | tuple[Any, Any]


def as_shared(given: Given, k: Any, v: Any) -> Shared:
    """What is given as `kv`, in place of inputs k and v, or an error that says what to give."""
    if k is not None or v is not None:
        raise ValueError(
            "kv are keys and values themselves, got inputs_k or inputs_v beside them; give one or "
            "the other"
        )
    if isinstance(given, tuple) and len(given) == 2:
        for name, x in zip(("keys", "values"), given, strict=True):
            checks.floating(f"kv's {name}", x)
        return KV(*given)
    if isinstance(given, Shared):
        return given
    raise TypeError(
        f"kv must be what a layer gave with return_kv=True, or keys and values as a pair, got "
        f"{checks.describe(given)}"
    )


def check(kv: Shared, q: jax.Array, Hv: int | None, mask: Any, order: Array | None) -> None:
    """Those of another layer must fit queries [*B, T, N, H], and what this layer does with them."""
    *B, _, N, H = q.shape
    k, v = kv.key.shape, kv.value.shape
    fits = len(k) > 2 and k[:-3] == tuple(B) and k[:-1] == v[:-1] and k[-1] == H and not N % k[-2]
    if not fits or v[-1] != (Hv or v[-1]):
        raise ValueError(
            f"kv must be keys [*B, S, K, H] and values [*B, S, K, Hv] with K a divisor of N, and "
            f"H and Hv as in this layer, whose queries [*B, T, N, H] are {q.shape} and Hv = "
            f"{Hv or 'any'}; got {k} and {v}; give both layers the same head_dim and v_head_dim"
        )
    if isinstance(kv, KV):
        if kv.ordered != (order is not None):
            raise ValueError(
                f"order must be given to both layers, the one that gives keys and values and the "
                f"one that takes them, or to none; got it for one, and keys of {k[-3]} tokens"
            )
        return
    lookback = None if mask is None else masks.as_mask(mask).max_lookback()
    if kv.window is not None and (lookback is None or lookback > kv.window):
        raise ValueError(
            f"kv are from a ring buffer with a window of {kv.window}, so the mask of a layer that "
            f"takes them must see none before it, got mask={mask}; give masks.Window(W, 0) with W "
            f"at most {kv.window}"
        )
