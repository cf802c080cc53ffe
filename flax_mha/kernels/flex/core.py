"""The custom derivative rule of flex, on the passes of any machine."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_mha.kernels import softmax
from flax_mha.kernels.flex.tile import FlexCall
from flax_mha.kernels.spec import Result, Sums, name_result


class Arrays(NamedTuple):
    """The arrays of a call on one device, or their gradients.

    Attributes:
      q: [R, N, T′, H]; T′ and S′ are T and S rounded up to whole blocks.
      k: [R, K, S′, H].
      v: [R, K, S′, Hv].
      leaves: the spec's leaves.
      sinks: float32 [1, N, 1, 1], or None.
      closed: the arrays that the call's functions close over.
      swapped: those of `FlexCall.swapped`.
      states: the states of the tiles, int32 [R|1, N|1, nq, nk].
      visits: the machine's lists of visited tiles, or None.
      rows: the rows' indices, int32 [R].
      heads: the query heads' indices, int32 [N].
    """

    q: Any
    k: Any
    v: Any
    leaves: list[Any]
    sinks: Any
    closed: Any
    swapped: Any
    states: Any
    visits: Any
    rows: Any
    heads: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def core(call: FlexCall, result: Result | None, x: Arrays) -> Result:
    """Return out [R, N, T′, Hv] and float32 sums [R, N, T′], precomputed or computed."""
    if result is not None:
        return result
    out, stats = _attend(call, x, x.q.dtype)
    return out, Sums(stats[:, :, 0], stats[:, :, 1])


def _attend(call: FlexCall, x: Arrays, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return call.machine.forward(call, x, dtype)


def _forward(call: FlexCall, result: Result | None, x: Arrays) -> tuple[Result, Any]:
    if result is not None:
        return result, (x, result[0], jnp.stack(result[1], 2))
    call = call._replace(reads_sums=True)
    # In float32, because δ must cancel with products of weights that are not rounded.
    out, stats = name_result(*_attend(call, x, jnp.float32))
    return (out.astype(x.q.dtype), Sums(stats[:, :, 0], stats[:, :, 1])), (x, out, stats)


def _backward(call: FlexCall, residuals: Any, cotangents: Any) -> tuple[None, Arrays]:
    x, out, stats = residuals
    top, total = stats[:, :, 0], stats[:, :, 1]
    dout, top, share, delta = softmax.gradient_inputs(out, total != 0, top, total, *cotangents)
    given = dout.astype(x.q.dtype), jnp.stack([top, share, delta], 2)
    dq, dk, dv, leaves = call.machine.gradients(call, x, *given)
    sinks = None
    if x.sinks is not None:
        by_row = softmax.sink_gradient(x.sinks[:, :, 0], top, share, delta)
        sinks = by_row.sum((0, 2))[None, :, None, None]
    return None, Arrays(dq, dk, dv, leaves, sinks, *[None] * 6)


core.defvjp(_forward, _backward)
