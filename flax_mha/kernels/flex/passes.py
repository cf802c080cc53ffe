"""The forward and the backward pass of flex, joined by a custom derivative rule, on any machine."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha.base import trees
from flax_mha.kernels.call.spec import Result, Sums, name_result
from flax_mha.kernels.flex.tile import LN2, LOG2E, FlexCall
from flax_mha.kernels.xla import softmax


class Tables(NamedTuple):
    """The rotation of queries and keys inside a kernel.

    Attributes:
      q: the cosines and sines of queries, float32 [R|1, 1, P, T′], as of a `Turn`, or of each
        feature, [R|1, 1, H, T′], if its pairs are interleaved.
      k: those of keys, float32 [R|1, 1, P|H, S′].
    """

    q: tuple[Any, Any]
    k: tuple[Any, Any]


class Arrays(NamedTuple):
    """The arrays of a call on one device, or their gradients.

    Attributes:
      q: [R, N, T′, H], where T′ and S′ are T and S rounded up to whole blocks, or [R, N, H, T′]
        with tokens in the lanes. In the kernel of whole rows, which needs none of the last four,
        it is [R, T, N·H].
      k: [R, K, S′, H], [R, K, H, S′] or [R, S, K·H].
      v: [R, K, S′, Hv], [R, K, Hv, S′] or [R, S, K·Hv].
      leaves: the spec's leaves.
      sinks: float32 [1, N, 1, 1], or None.
      closed: the arrays that the call's functions close over.
      rows: the rows' indices, int32 [R].
      heads: the query heads' indices, int32 [N].
      swapped: the arrays that the functions of `FlexCall.swapped` close over.
      states: the states of the tiles, int32 [R|1, N|1, nq, nk].
      visits: the machine's lists of visited tiles, or None.
      tables: the rotation of q and k, or None.
    """

    q: Any
    k: Any
    v: Any
    leaves: list[Any]
    sinks: Any
    closed: Any = None
    rows: Any = None
    heads: Any = None
    swapped: Any = None
    states: Any = None
    visits: Any = None
    tables: Tables | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def core(call: FlexCall, result: Result | None, x: Arrays) -> Result:
    """Return out, as q, and float32 sums [R, N, T′], precomputed or computed."""
    if result is not None:
        return result
    (out,), stats = _attend(call, False, x)
    return out, _sums(stats)


def _sums(stats: jax.Array) -> Sums:
    return Sums(stats[:, :, 0] * LN2, stats[:, :, 1])


@functools.partial(trees.trace_once, num_static=2)
def _attend(call: FlexCall, exact: bool, x: Arrays) -> tuple[list[jax.Array], jax.Array]:
    return call.machine.forward(call, x, exact)


def _forward(call: FlexCall, result: Result | None, x: Arrays) -> tuple[Result, Any]:
    if result is not None:
        top, total = result[1]
        # The maximum of a fully masked query must stay finite.
        top = jnp.maximum(top * LOG2E, softmax.finfo_min(top.dtype))
        return result, (x, [result[0]], jnp.stack([top, total], 2))
    call = call._replace(reads_sums=True)
    parts, stats = name_result(*_attend(call, True, x))
    out = parts[0].astype(x.q.dtype)
    return (out, _sums(stats)), (x, parts, stats)


def split(out: jax.Array, dtype: Any, exact: bool) -> list[jax.Array]:
    """Return float32 numbers in a dtype, and if they must be exact, the bits that it loses.

    For bfloat16 these are the next 8 bits, as int8. Without them, δ would cancel against products
    of unrounded weights.
    """
    if not exact or dtype not in (jnp.float32, jnp.bfloat16):
        return [out.astype(jnp.float32 if exact else dtype)]
    parts = [out.astype(dtype)]
    if dtype == jnp.bfloat16:
        rest = _bits(out) - _bits(parts[0])
        parts.append(jnp.minimum((rest + 128) >> 8, 127).astype(jnp.int8))
    return parts


def _join(out: jax.Array, *rest: jax.Array) -> jax.Array:
    """Return the numbers that `split` was given, or out if there is no rest."""
    if not rest:
        return out
    bits = _bits(out) + (rest[0].astype(jnp.int32) << 8)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    """Return the bits of numbers in float32, as int32."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _backward(call: FlexCall, residuals: Any, cotangents: Any) -> tuple[None, Arrays]:
    return None, _gradients(call, *residuals, cotangents)


@trees.trace_once
def _gradients(
    call: FlexCall, x: Arrays, parts: list[jax.Array], stats: jax.Array, cotangents: Any
) -> Arrays:
    """Return the gradients of the arrays, from `split` out and the sums, and their cotangents."""
    top, total = stats[:, :, 0], stats[:, :, 1]
    dout, dsums = cotangents
    features = -2 if call.machine.lanes else -1
    dout, top, share, delta = softmax.gradient_inputs(
        _join(*parts), total != 0, top, total, dout, dsums, features
    )
    given = dout.astype(x.q.dtype), jnp.stack([top, share, delta], 2)
    dq, dk, dv, leaves = call.machine.gradients(call, x, *given)
    sinks = None
    if x.sinks is not None:
        by_row = softmax.sink_gradient(x.sinks[:, :, 0], top * LN2, share, delta)
        sinks = by_row.sum((0, 2))[None, :, None, None]
    return Arrays(dq, dk, dv, leaves, sinks)


core.defvjp(_forward, _backward)
