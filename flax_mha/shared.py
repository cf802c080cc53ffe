"""Keys and values that one layer gives, and others attend to."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import inputs, masks, shapes
from flax_mha.cache import Extended
from flax_mha.grid import Array
from flax_mha.kernels import dot_product_attention


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
            inputs.floating(f"kv's {name}", x)
        return KV(*given)
    if isinstance(given, Shared):
        return given
    raise TypeError(
        f"kv must be what a layer gave with return_kv=True, or keys and values as a pair, got "
        f"{inputs.came(given)}"
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
    reach = None if mask is None else masks.as_mask(mask).reach()
    if kv.window is not None and (reach is None or reach > kv.window):
        raise ValueError(
            f"kv are from a ring buffer with a window of {kv.window}, so the mask of a layer that "
            f"takes them must see none before it, got mask={mask}; give masks.Window(W, 0) with W "
            f"at most {kv.window}"
        )
