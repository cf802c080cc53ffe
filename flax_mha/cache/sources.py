"""Sources of keys and values: the methods of all of them, and the source of one call."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from flax.typing import Dtype

from flax_mha import masks
from flax_mha.base import shapes
from flax_mha.base.coordinates import Array
from flax_mha.base.trees import Struct
from flax_mha.kernels import dot_product_attention


class Tokens(NamedTuple):
    """The tokens of a call, for a source to open.

    Attributes:
      new: the keys and values computed in the call; None in it if the source has its own.
      kept: the keys and values that a cache keeps of them.
      T: the number of queries.
      lengths: int [*B], the number of real queries of each row; None for all.
      mask: the mask of the layer.
      dtype: the dtype in which an encoder's keys and values are stored (default: their own).
    """

    new: "KeyValue"
    kept: tuple[Any, Any]
    T: int
    lengths: jax.Array | None
    mask: masks.MaskLike | None
    dtype: Dtype | None


class Source:
    """The origin of a layer's keys and values. The base class stands for the call's inputs.

    Attributes:
      is_given: True if they are not of the queries' tokens, but an encoder's or another layer's.
      is_shared: True if they are another layer's.
      appends: True if the queries' tokens are appended to a cache.
      has_slots: True if keys and values are in the slots of such a cache.
      is_ring: True if the slots are a ring buffer.
    """

    is_given = False
    is_shared = False
    appends = False
    has_slots = False
    is_ring: Any = False

    def next_positions(self, T: int) -> Any:
        """Return the positions of the next T queries of each row; None for 0 … T−1."""
        del T
        return None

    def open(self, tokens: Tokens) -> tuple[Any, Any]:
        """Return the `KeyValue` or `Extended` that a call attends to, and the cache after it."""
        return tokens.new, None


class Shared(Source):
    """The keys and values that a call attends to, which other layers may attend to as well."""

    key: Any
    value: Any
    q_positions: Any
    window: Any = None
    ordered: bool = False
    replace: Any
    attend: Any
    is_given = True
    is_shared = True

    def own(self) -> tuple[Any, Any]:
        """Return the keys and values of the call's own tokens."""
        return self.key, self.value

    def next_positions(self, T: int) -> Any:
        """Return the positions of the queries; None for 0 … T−1."""
        del T
        return self.q_positions

    def open(self, tokens: Tokens) -> tuple[Self, None]:
        """Return these keys and values, of which no cache is kept."""
        return self, None


class KeyValue(Shared, Struct):
    """The keys and values of one call of a layer, after normalization and rotary embedding.

    Attributes:
      key: [*B, S, K, H].
      value: [*B, S, K, Hv].
      lengths: int [*B], the number of real tokens of each row; None for all.
      ordered: True if the call had an `order`.
      q_positions: int32 [*B, T], the positions of queries that continue those of earlier calls;
        None for 0 … T−1, or the call's order.
    """

    key: Any
    value: Any
    lengths: jax.Array | None = None
    ordered: bool = struct.field(pytree_node=False, default=False)
    q_positions: Any = None

    def attend(
        self, q: jax.Array, *, mask: masks.MaskLike | None = None, lengths: jax.Array | None = None,
        attention: Callable[..., Any] = dot_product_attention, order: Array | None = None,
        **call: Any,
    ) -> Any:  # fmt: skip
        """Attend from queries q [*B, T, N, H], the first `lengths` of each row.

        `order` has the place of each token, if they are given in another order. `attention` is
        called in place of `dot_product_attention`, with its other arguments.
        """
        places = self.places(q, mask, lengths, order)
        return attention(q, self.key, self.value, **places, **call)

    def places(
        self, q: jax.Array, mask: masks.MaskLike | None, lengths: jax.Array | None,
        order: Array | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the positions of queries and keys, and a mask that also hides all padding."""
        q_positions = order if self.q_positions is None else self.q_positions
        places = {"mask": mask, "q_positions": q_positions, "kv_positions": order}
        if self.lengths is None and lengths is None:
            return places
        batch = q.shape[:-3]

        def as_lengths(lengths: jax.Array | None, length: int) -> jax.Array:
            if lengths is None:
                return jnp.full(batch, length)
            return shapes.per_row("lengths", lengths, batch, length)

        kv_lengths = as_lengths(self.lengths, self.key.shape[-3])
        q_lengths = as_lengths(lengths, q.shape[-3])
        if self.q_positions is not None:
            q_lengths = q_lengths + self.q_positions[..., 0]
        return places | {"mask": masks.combine(mask, masks.Lengths(kv_lengths, q_lengths))}


class Encoded(Struct):
    """Inputs of keys and values from another sequence, such as an encoder's output, to be kept.

    As the argument `kv` of a layer that decodes, it makes the layer compute these keys and values
    once. Later calls attend to them, with `Encoded()` or without `kv`. Without `decode` it is the
    same as `inputs_k` and `inputs_v`.

    Attributes:
      inputs_k: the inputs of the keys [*B, S, D'], or None for the keys and values that are kept.
      inputs_v: the inputs of the values [*B, S, D''] (default: inputs_k).
      makes_room: True in a call that only makes the cache, as `init` does: its queries, if they are
        the first, are not counted.
    """

    inputs_k: Any = None
    inputs_v: Any = None
    makes_room: bool = struct.field(pytree_node=False, default=False)
