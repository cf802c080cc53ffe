"""Einsum, and operations whose gradients are summed in float32 at least."""

import contextlib
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha.base import checks
from flax_mha.base.shapes import Shape, check_shape, lead, wide

# Outside jit, `jnp.einsum` would parse its subscripts in each call.
_parsed_einsum: Any = jax.jit(
    jnp.einsum, static_argnums=0, static_argnames=("precision", "preferred_element_type"),
    inline=True,
)  # fmt: skip

# Compiled programs and profiles then name the line that calls `einsum`.
with contextlib.suppress(ImportError, AttributeError):
    from jax.extend import source_info_util

    source_info_util.register_exclusion(__file__)


def einsum(subscripts: str, *operands: Any, **options: Any) -> jax.Array:
    """Return `jnp.einsum` of the operands, with the subscripts parsed once.

    qwix (LoRA, quantization) changes `jnp.einsum` in place while its models run, which a cache of
    jit would not see. A process that has imported qwix therefore parses at each call.
    """
    compute: Any = jnp.einsum if "qwix" in sys.modules else _parsed_einsum
    result: jax.Array = compute(subscripts, *operands, **options)
    return result


def scale_heads(name: str, x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Multiply heads x [*B, T, N, H] by the argument `name`, a scale [N], [*B, N] or None."""
    if scale is None:
        return x
    if jnp.issubdtype(checks.array(name, scale).dtype, jnp.complexfloating):
        raise TypeError(f"{name} must be real, got {scale.dtype}; take its absolute value")
    *B, _, N, _ = x.shape
    expected = {"[N]": (N,), "[*B, N]": (*B, N)}
    check_shape(name, scale, expected, "give one number for each head")
    return scaled(x, lead(scale, x.ndim - 2)[..., None, :, None])


def scaled(x: jax.Array, factor: Any) -> jax.Array:
    """Return x·factor in the dtype of x, multiplied and differentiated in float32 at least."""
    dtype = wide(x.dtype)
    return (x.astype(dtype) * jnp.asarray(factor, dtype)).astype(x.dtype)


def look_up(table: jax.Array, indices: Any, dtype: Any = None) -> jax.Array:
    """Return rows [*P, D] of a table [V, D] at int indices [*P], NaN if out of range.

    `dtype` is the rows' dtype (default: the table's). Gradients are summed in float32 at least.
    """
    # `jnp.take` would count negative indices from the end.
    return _take(dtype or table.dtype, table, jnp.where(indices < 0, len(table), indices))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _take(dtype: Any, table: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take(table, indices, axis=0, mode="fill").astype(dtype)


@_take.defjvp
def _take_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # Only the gradient is wide, so that no wide copy of the table is made.
    rows = jnp.take(_wide_tangent(tangents[0]), primals[1], axis=0, mode="fill", fill_value=0)
    return _take(dtype, *primals), rows.astype(dtype)


@jax.custom_jvp
def _widened(x: jax.Array) -> jax.Array:
    return x.astype(wide(x.dtype))


@_widened.defjvp
def _widened_jvp(x: tuple[jax.Array], tangent: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _widened(*x), _wide_tangent(*tangent)


def _wide_tangent(x: jax.Array) -> jax.Array:
    """Widen a tangent to float32 at least, so that its transpose is summed before it is rounded."""
    if x.dtype == wide(x.dtype) and jax.sharding.get_abstract_mesh().size > 1:
        # XLA sums gradients over devices at once only if nothing stands between them. On one chip
        # a rounding that changes nothing makes programs shorter.
        return x
    bits = jnp.finfo(x.dtype)
    # XLA for TPUs sums in the type that the sum is cast to, even across an optimization barrier.
    return jax.lax.reduce_precision(x.astype(wide(x.dtype)), bits.nexp, bits.nmant)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"), inline=True)
def spread(x: jax.Array, shape: Shape, dtype: Any) -> jax.Array:
    """Broadcast x to a shape and cast it. Its gradient is summed in float32 at least."""
    x = x if x.dtype == wide(x.dtype) else _widened(x)
    return jnp.broadcast_to(lead(x, len(shape)), shape).astype(dtype)


@functools.partial(jax.jit, inline=True)
def plus(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Add a bias of the last axes to x, in the dtype of x."""
    return x + spread(bias, x.shape, x.dtype)
