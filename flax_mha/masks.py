"""Which keys a query may see.

A mask is a value. It is built once, combined with `&`, `|` and `~`, and handed to the layer or to
`dot_product_attention`; the kernels ask it about blocks of positions:

>>> mask = Causal() & Lengths(jnp.array([3, 2]))

| mask | the query at position i sees the key at position j when |
|---|---|
| `Causal()` | j ≤ i |
| `Lengths(kv, q=None)` | j < kv (and, if q is given, i < q) |
| `Dense(array)` | the array says so |

Positions count from 0 at the first query and at the first key (top-left aligned when T ≠ S),
unless the caller gives them. A bool array is taken wherever a mask is, as `Dense`: True = may see.

Masks are pytrees: their arrays are leaves, so they pass through jit, grad, vmap and scan.
A mask of your own is a subclass with an `allowed` method.
"""

from typing import Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import shapes
from flax_mha.shapes import Dims


class Mask(struct.PyTreeNode):
    """The base of all masks, and their algebra."""

    # So that `ndarray & mask` asks the mask, not NumPy, what `&` means.
    __array_ufunc__ = None

    def bind(self, dims: Dims) -> Self:
        """Checks the mask's arrays against a call, and gives each the rank of the logits.

        A bound mask's arrays have shape [*B|1, N|1, T|1, S|1]. Axes of size 1 stand for all.
        """
        del dims
        return self

    def allowed(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """Tells which pairs may attend.

        Args:
          q_pos: positions of the queries, int [*B|1, 1, T, 1].
          k_pos: positions of the keys, int [*B|1, 1, 1, S].

        Returns:
          bool, broadcastable to [*B, N, T, S].
        """
        raise NotImplementedError(f"{type(self).__name__} must define allowed(q_pos, k_pos)")

    def __and__(self, other: "MaskLike") -> "Mask":
        return And((self, as_mask(other)))

    def __rand__(self, other: "MaskLike") -> "Mask":
        return And((as_mask(other), self))

    def __or__(self, other: "MaskLike") -> "Mask":
        return Or((self, as_mask(other)))

    def __ror__(self, other: "MaskLike") -> "Mask":
        return Or((as_mask(other), self))

    def __invert__(self) -> "Mask":
        return Not(self)


MaskLike: TypeAlias = Mask | jax.Array | np.ndarray


class Causal(Mask):
    """A query sees its own position and the ones before: j ≤ i."""

    def allowed(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """See `Mask.allowed`."""
        return k_pos <= q_pos


class Lengths(Mask):
    """Only the first `kv` keys are real: j < kv.

    Attributes:
      kv: int, [*B], or [*B, T] for a length per query (the `valid_lens` of d2l).
      q: int [*B] or None. Queries at positions i ≥ q see nothing, so their output is 0.
    """

    kv: jax.Array
    q: jax.Array | None = None

    def bind(self, dims: Dims) -> Self:
        """See `Mask.bind`."""
        return self.replace(
            kv=_per_row("Lengths.kv", self.kv, dims, per_query=True),
            q=None if self.q is None else _per_row("Lengths.q", self.q, dims),
        )

    def allowed(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """See `Mask.allowed`."""
        real = k_pos < self.kv
        return real if self.q is None else real & (q_pos < self.q)


class Dense(Mask):
    """An explicit table, True where the query may see the key.

    Attributes:
      array: bool, broadcastable to [*B, N, T, S].
    """

    array: jax.Array | np.ndarray

    def bind(self, dims: Dims) -> Self:
        """See `Mask.bind`."""
        array = jnp.asarray(self.array)
        if array.dtype != jnp.bool_:
            raise TypeError(
                f"a mask must be bool (True = may attend), got {array.dtype}; "
                f"cast with .astype(bool), or give additive scores as bias="
            )
        shapes.check_broadcasts(
            "mask", array.shape, dims.logits, "[*B, N, T, S]",
            "a mask without heads needs the axis: mask[..., None, :, :]",
        )  # fmt: skip
        return self.replace(array=shapes.lead(array, len(dims.logits)))

    def allowed(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """See `Mask.allowed`."""
        del q_pos, k_pos
        return jnp.asarray(self.array)


class _Combined(Mask):
    """Several masks joined by one operator."""

    masks: tuple[Mask, ...]

    def bind(self, dims: Dims) -> Self:
        return self.replace(masks=tuple(mask.bind(dims) for mask in self.masks))


class And(_Combined):
    """Allowed where every one of its masks allows."""

    def allowed(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """See `Mask.allowed`."""
        first, *rest = (mask.allowed(q_pos, k_pos) for mask in self.masks)
        for other in rest:
            first = first & other
        return first


class Or(_Combined):
    """Allowed where any of its masks allows."""

    def allowed(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """See `Mask.allowed`."""
        first, *rest = (mask.allowed(q_pos, k_pos) for mask in self.masks)
        for other in rest:
            first = first | other
        return first


class Not(Mask):
    """Allowed where its mask forbids."""

    mask: Mask

    def bind(self, dims: Dims) -> Self:
        """See `Mask.bind`."""
        return self.replace(mask=self.mask.bind(dims))

    def allowed(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """See `Mask.allowed`."""
        return ~self.mask.allowed(q_pos, k_pos)


def as_mask(mask: MaskLike) -> Mask:
    """A mask as it is; an array as `Dense`."""
    if isinstance(mask, Mask):
        return mask
    if hasattr(mask, "dtype") and hasattr(mask, "shape"):
        return Dense(mask)
    raise TypeError(
        f"a mask must be a flax_mha.masks.Mask or a bool array, got {type(mask).__name__}"
    )


def combine(*masks: MaskLike | None) -> Mask | None:
    """The conjunction of those that are not None; None if there is none."""
    given = tuple(as_mask(mask) for mask in masks if mask is not None)
    return And(given) if len(given) > 1 else next(iter(given), None)


def _per_row(name: str, lengths: jax.Array, dims: Dims, per_query: bool = False) -> jax.Array:
    """Lengths [*B] (or [*B, T]) as [*B, 1, 1|T, 1]."""
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {lengths.dtype}; cast with .astype(int)")
    if lengths.shape == dims.B:
        return lengths.reshape(*dims.B, 1, 1, 1)
    if per_query and lengths.shape == (*dims.B, dims.T):
        return lengths.reshape(*dims.B, 1, dims.T, 1)
    or_per_query = f" or [*B, T] = {(*dims.B, dims.T)}" if per_query else ""
    raise ValueError(
        f"{name} must have shape [*B] = {dims.B}{or_per_query}, got {lengths.shape}; "
        f"give one length for each row of the batch"
    )
