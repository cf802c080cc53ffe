"""The letters of the dimensions, and checks of shapes.

All signatures, einsums and errors of this package use these letters:

| letter | dimension |
|---|---|
| `*B` | any leading batch dimensions |
| `T` | queries (target positions) |
| `S` | keys and values (source positions) |
| `N` | query heads |
| `K` | key/value heads; `N` is a multiple of `K` |
| `G` | query heads that share one key/value head, `N / K` |
| `H`, `Hv` | features of a query or key head, of a value head |
| `D` | features of the model |
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype, Initializer

from flax_mha.base import checks
from flax_mha.base.symbols import count_up

Shape = tuple[int, ...]


class Dims(NamedTuple):
    """The sizes of one attention call."""

    B: Shape
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int

    @classmethod
    def of(cls, q: Any, k: Any, v: Any) -> "Dims":
        """Return the sizes of q [*B, T, N, H], k [*B, S, K, H] and v [*B, S, K, Hv]."""
        *B, T, N, H = q.shape
        return cls(tuple(B), T, k.shape[-3], N, k.shape[-2], H, v.shape[-1])

    @property
    def G(self) -> int:
        """The number of query heads per key/value head."""
        return self.N // self.K

    @property
    def logits(self) -> Shape:
        """The shape of the scores, [*B, N, T, S]."""
        return (*self.B, self.N, self.T, self.S)


def attention_dims(q: jax.Array, k: Any, v: Any) -> Dims:
    """Return the sizes of q, k and v, whose shapes must fit together."""
    fits = (
        q.ndim == k.ndim == v.ndim >= 3
        and q.shape[:-3] == k.shape[:-3]
        and k.shape == (*v.shape[:-1], q.shape[-1])
        and 0 not in (*q.shape[-2:], *v.shape[-2:])
    )
    if not fits:
        raise ValueError(
            f"q, k and v must have shapes [*B, T, N, H], [*B, S, K, H] and [*B, S, K, Hv] of the "
            f"same rank, got {q.shape}, {k.shape} and {v.shape}; split features into at least one "
            f"head of one feature, and broadcast batch dimensions first"
        )
    check_kv_heads(q.shape[-2], k.shape[-2])
    return Dims.of(q, k, v)


def check_inputs(q: jax.Array, k: jax.Array | None, v: jax.Array | None) -> None:
    """Check that the inputs of a layer are [*B, T, ·], [*B, S, ·] and [*B, S, ·]."""
    if k is None and v is not None:
        raise ValueError(
            "inputs_v needs inputs_k, got None; to use one array for both, give it as inputs_k"
        )
    for name, x in (("inputs_q", q), ("inputs_k", k), ("inputs_v", v)):
        if x is not None:
            check_features(name, x)


def check_features(name: str, x: Any) -> None:
    """Check that x is floating point, [*B, length, features]."""
    shape = checks.floating(name, x).shape
    if len(shape) < 2 or not shape[-1]:
        raise ValueError(
            f"{name} must have shape [*B, length, features], got {shape}; "
            f"add a length axis, and at least one feature"
        )


def head_sizes(
    features: int,
    num_heads: int,
    num_kv_heads: int | None,
    qkv_features: int | None,
    head_dim: int | None,
    v_head_dim: int | None,
) -> tuple[int, int, int, int]:
    """Return N, K, H and Hv of a layer with these fields, for inputs of `features` features.

    By default, K = N, qkv_features = features, H = qkv_features / N and Hv = H.
    """
    checks.optional(
        num_heads=num_heads, qkv_features=qkv_features, head_dim=head_dim,
        num_kv_heads=num_kv_heads, v_head_dim=v_head_dim,
    )  # fmt: skip
    N = num_heads
    K = N if num_kv_heads is None else num_kv_heads
    check_kv_heads(N, K)
    H = head_dim
    if H is None:
        H, remainder = divmod(features if qkv_features is None else qkv_features, N)
        if remainder:
            raise ValueError(
                f"num_heads={N} must divide the features of queries and keys, got "
                f"{N * H + remainder}; set head_dim to choose the size of a head freely"
            )
    elif qkv_features not in (None, N * H):
        raise ValueError(
            f"qkv_features must be num_heads * head_dim = {N} * {H} = {N * H}, got "
            f"{qkv_features}; give one of head_dim and qkv_features"
        )
    return N, K, H, H if v_head_dim is None else v_head_dim


def check_kv_heads(num_heads: int, num_kv_heads: int) -> None:
    """Check that key/value heads divide the query heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"the number of key/value heads must divide num_heads={num_heads}, got {num_kv_heads}"
        )


def per_row(name: str, x: Any, batch: Shape, most: int, least: int = 0) -> jax.Array:
    """Convert a number for each row of the batch to int32 [*B], in a range if it is static."""
    x = checks.integers(name, x)
    check_shape(name, x, {"[*B]": batch}, "give one number for each row of the batch")
    checks.within(name, x, most + 1, "each counts tokens of its row", least)
    return jnp.asarray(x)


def per_token(name: str, x: Any, tokens: Shape, letter: str = "T") -> Any:
    """Convert a number for each token to int32 [T] or [*B, T]."""
    x = checks.integers(name, x)
    expected = {f"[{letter}]": tokens[-1:], f"[*B, {letter}]": tokens}
    check_shape(name, x, expected, "give one number for each token")
    return x


def positions(name: str, x: Any, tokens: Shape, letter: str) -> Any:
    """Convert positions to int32 [T] or [*B, T]. A number is the first position."""
    if x is None:
        return None
    x = checks.integers(name, x)
    if x.ndim == 0:
        x = x + count_up(tokens[-1])
    return per_token(name, x, tokens, letter)


def check_order(order: Any, length: int) -> Any:
    """Check that an order of tokens is a permutation of 0 … T−1."""
    order = checks.integers("order", order)
    check_shape("order", order, {"[T]": (length,)}, "give one order for all rows")
    if checks.is_concrete(order) and not np.array_equal(np.sort(order), np.arange(length)):
        raise ValueError(
            f"order must be a permutation of 0 … {length - 1}, got {np.asarray(order).tolist()}; "
            f"give each position once, as in sharding.zigzag({length}, n)"
        )
    return order


def check_shape(name: str, x: Any, expected: Mapping[str, Shape], remedy: str) -> None:
    """Check that x has one of the expected shapes, whose keys are their letters."""
    if x.shape not in expected.values():
        shapes = " or ".join(f"{letters} = {shape}" for letters, shape in expected.items())
        raise ValueError(f"{name} must have shape {shapes}, got {x.shape}; {remedy}")


def check_broadcasts(name: str, shape: Shape, to: Shape, letters: str, remedy: str) -> None:
    """Check that `shape` broadcasts to the shape `to`, with axes named by `letters`."""
    fits = len(shape) <= len(to) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to {letters} = {to}, got {shape}; {remedy}")


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of scores, sums and the softmax: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def draw(init: Initializer, rng: Any, shape: Shape, dtype: Dtype) -> Any:
    """Return init(rng, shape, dtype), drawn in float32 at least.

    In bfloat16, JAX's initializers draw one of 128 numbers, whose mean is below 0.
    """
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize >= 4:
        return init(rng, shape, dtype)
    value: Any = init(rng, shape, jnp.float32)
    if hasattr(value, "raw_value"):  # nnx's VariableMetadata, which is no tree.
        return dataclasses.replace(value, raw_value=value.raw_value.astype(dtype))
    return jax.tree.map(lambda x: x.astype(dtype), value)


def by_query(x: jax.Array) -> jax.Array:
    """Transpose [*B, N, T] to [*B, T, N, 1]."""
    return jnp.swapaxes(x, -1, -2)[..., None]


def lead(x: Any, rank: int) -> Any:
    """Add leading axes of size 1 up to a rank."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape)
