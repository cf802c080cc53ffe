"""Ring attention: queries stay where they are, keys and values go round the devices.

Each of n devices has a block of the queries and a block of the keys. In step s it computes its
queries' attention to the block of the device s places before it, while that block is on its way to
the next device, and merges what it gets with what it has:

    lse = log(exp(lse₁) + exp(lse₂));   out = exp(lse₁ − lse)·out₁ + exp(lse₂ − lse)·out₂

Steps in which a mask known before tracing lets no device see anything are left out, and their
blocks never sent; a device that sees nothing in a step computes nothing. The backward pass goes
round again, from the out and lse of all blocks, with the gradients of each block travelling behind
it, and home in the end. They are summed in float32: in bfloat16 each device on the way would round
the sum once more. So memory is that of one block and its neighbour, forward and backward.

Sources: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023; the merge is
that of Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_mha.base import shapes
from flax_mha.base.coordinates import Array, map_score_arrays
from flax_mha.base.shapes import Dims
from flax_mha.base.trees import combine, is_array, is_inexact, partition
from flax_mha.kernels import derivatives, softmax
from flax_mha.kernels.choose import Explanation
from flax_mha.kernels.spec import AttentionSpec, Platform, Result
from flax_mha.kernels.tile_plan import Plan, tile_states
from flax_mha.kernels.tiles import empty_result
from flax_mha.masks import EMPTY, Causal

# (q, k, v, spec, known) -> (out, lse): what a device does. Given a result that is known, of these
# keys among others, it gives that, and its gradients.
Attend = Callable[..., Result]


class Ring(NamedTuple):
    """The devices, and which steps they take.

    Attributes:
      axes: the mesh axes that queries and keys are divided over.
      seen: bool [n, n], whether the queries of a device may see the keys of another, if it is
        known.
      steps: how many places before it the blocks come from that a device computes with, ascending.
      plain: whether other devices' blocks are seen whole or not at all, as under a causal mask:
        then a step needs no positions, and cuDNN, which takes none, can compute it.
    """

    axes: Any
    seen: np.ndarray
    steps: tuple[int, ...]
    plain: bool = False

    @classmethod
    def of(cls, axes: Any, n: int, spec: AttentionSpec, dims: Dims, platform: Platform) -> "Ring":
        """The ring of n devices for a call, of which dims and spec are the whole."""
        seen, plain = np.ones((n, n), bool), False
        where = jax.tree.leaves((spec.mask, spec.q_pos, spec.k_pos))
        # Arrays that are traced, or divided over devices, are not asked: nothing would be known.
        if not any(isinstance(x, jax.Array) for x in where):
            verdict = tile_states(spec, spec.at(dims), Plan(dims, dims.T // n, dims.S // n))
            seen = np.asarray(verdict).max((0, 1)) > EMPTY
            # Only on GPUs: kernels for others take positions, and compute the same with them.
            others = spec.q_pos, spec.k_pos, spec.dropout, *spec.scores
            plain = dims.T == dims.S and others == (None,) * 3 and platform.name == "gpu"
            plain &= spec.mask is None or type(spec.mask) is Causal
        here = np.arange(n)
        return cls(axes, seen, tuple(s for s in range(n) if seen[here, here - s].any()), plain)

    def send(self, tree: Any, hop: int) -> Any:
        """Shifts arrays `hop` devices forward."""
        n = len(self.seen)
        if hop % n == 0:
            return tree
        pairs = [(i, (i + hop) % n) for i in range(n)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), tree)

    def source(self, step: Array | int) -> jax.Array:
        """Whose keys this device has in a step."""
        return (lax.axis_index(self.axes) - step) % len(self.seen)

    def cut(self, tree: Any, S: int, start: jax.Array) -> Any:
        """Leaves of a spec of all n·S keys, of S of them."""
        n = len(self.seen)

        def cut(x: Array) -> Array:
            if x.shape[-1] != n * S or n == 1:
                return x
            return lax.dynamic_slice_in_dim(jnp.asarray(x), start, S, axis=-1)

        return map_score_arrays(cut, tree)

    def of_step(self, spec: AttentionSpec, step: Array | int) -> AttentionSpec:
        """The spec of a step's keys, without a mask where everything is seen."""
        if not self.plain:
            return spec
        is_home = isinstance(step, int) and step == 0
        return spec.replace(mask=spec.mask if is_home else None, q_pos=None, k_pos=None)

    def where_seen(self, step: Any, fn: Callable[..., Any], otherwise: Any, *args: Any) -> Any:
        """fn(*args) on the devices that see something in a step, `otherwise` on the others."""
        if self.seen.all():
            return fn(*args)
        seen = jnp.asarray(self.seen)[lax.axis_index(self.axes), self.source(step)]
        return lax.cond(seen, fn, lambda *_: otherwise, *args)

    def go(
        self, steps: Sequence[int], visit: Callable[..., Any], state: Any, blocks: Result
    ) -> tuple[Any, Any]:
        """Go round: state, sums = visit(step, state, blocks) in each of the steps.

        Returns the last state, and the sum of each device's blocks' sums over the steps, if any.
        """
        add = functools.partial(jax.tree.map, jnp.add)

        def turn(leg: Leg, carry: Any, step: Any) -> tuple[Any, None]:
            state, blocks, behind = carry
            # Sent before anything is computed, so that both can happen at once.
            following = self.send(blocks, leg.following)
            behind = self.send(behind, leg.hop)
            state, sums = visit(step, state, blocks)
            return (state, following, sums if behind is None else add(sums, behind)), None

        home: Any = None
        behind: Any = None
        blocks = self.send(blocks, steps[0] if steps else 0)
        for leg in schedule(steps, len(self.seen)):
            carry = state, blocks, behind
            if len(leg.steps) > 1:
                carry, _ = lax.scan(functools.partial(turn, leg), carry, np.array(leg.steps))
            else:
                carry, _ = turn(leg, carry, leg.steps[0])
            state, blocks, behind = carry
            if leg.steps[0] == 0:
                # The sums of a device's own blocks, which need not travel.
                home, behind = behind, None
        if behind is not None:
            behind = self.send(behind, -steps[-1])
            home = behind if home is None else add(home, behind)
        return state, home


class Leg(NamedTuple):
    """Steps in a row between which the blocks travel equally far: one, or those of a loop.

    Attributes:
      steps: see `Ring`.
      hop: how many devices forward the sums of a step travel from the step before.
      following: how many devices forward the blocks of a step travel to the one after it.
    """

    steps: tuple[int, ...]
    hop: int
    following: int


def schedule(steps: Sequence[int], n: int) -> list[Leg]:
    """Return the legs of a way round n devices, in order; only the first step may be 0.

    A loop has the same arrays from its first step: it begins where sums travel already.
    """
    hops = (np.diff([0, *steps, *steps[-1:]]) % n).tolist()
    travelling = 2 if 0 in steps else 1
    legs: list[Leg] = []
    for t, step in enumerate(steps):
        leg = Leg((step,), hops[t], hops[t + 1])
        if t > travelling and legs[-1][1:] == leg[1:]:
            leg = leg._replace(steps=(*legs.pop().steps, step))
        legs.append(leg)
    return legs


def attend(
    ring: Ring, local: Attend, q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec
) -> Result:
    """Attention of this device's queries to the keys of all; inside `jax.shard_map`.

    Args:
      ring: the devices.
      local: attention to a block of keys.
      q: [*B, T/n, N, H].
      k: [*B, S/n, K, H].
      v: [*B, S/n, K, Hv].
      spec: the rest of the call, of this device's queries and all S keys, with all coordinates.

    Returns out [*B, T/n, N, Hv] and lse [*B, N, T/n].
    """
    q, k, v, spec = derivatives.limit("reverse", "ring", (q, k, v, spec))
    arrays, known = partition(spec.replace(sinks=None), is_array)
    out, lse = _core(ring, local, known, q, k, v, arrays)
    if spec.sinks is not None:
        total = jnp.logaddexp(lse, shapes.lead(spec.sinks.astype(lse.dtype)[:, None], lse.ndim))
        whole = out.astype(lse.dtype) * shapes.by_query(jnp.exp(lse - total))
        out, lse = _unless_empty(lse, whole.astype(out.dtype)), total
    return out, lse


def explain(
    ring: Ring, local: Callable[..., Explanation], q: jax.Array, k: Any, v: Any, spec: AttentionSpec
) -> Explanation:
    """Tell what `local` does with the block of keys that this device attends to first."""
    step, S = ring.steps[0] if ring.steps else 0, k.shape[-3]
    spec = ring.cut(spec.replace(sinks=None), S, ring.source(step) * S)
    return local(q, k, v, ring.of_step(spec, step))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _core(
    ring: Ring, local: Attend, known: Any, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Any
) -> Result:
    """See `attend`; known and arrays are the leaves of the spec, known before tracing or not."""
    S = k.shape[-3]

    def visit(step: Any, merged: Result, blocks: Result) -> tuple[Result, tuple[()]]:
        def see(k: jax.Array, v: jax.Array) -> Result:
            spec = ring.cut(combine(arrays, known), S, ring.source(step) * S)
            return softmax.merge(merged, local(q, k, v, ring.of_step(spec, step)))

        return ring.where_seen(step, see, merged, *blocks), ()

    dims = shapes.Dims.of(q, k, v)
    out, lse = empty_result(dims, shapes.wide(q.dtype), None)
    (out, lse), _ = ring.go(ring.steps, visit, (out, lse), (k, v))
    return out.astype(q.dtype), lse


def _unless_empty(lse: jax.Array, x: jax.Array) -> jax.Array:
    """X [*B, T, N, ·] with 0 for queries that see nothing: NaN would meet their weights of 0."""
    return jnp.where(shapes.by_query(lse) == -jnp.inf, 0.0, x)


def _forward(ring: Ring, local: Attend, known: Any, *primals: Any) -> tuple[Result, Any]:
    q, k, v, arrays = jax.tree.map(lambda x: x.value, primals)
    out, lse = _core(ring, local, known, q, k, v, arrays)
    return (out, lse), (q, k, v, arrays, out, lse)


def _backward(
    ring: Ring, local: Attend, known: Any, residuals: Any, cotangents: Result
) -> tuple[Any, ...]:
    q, k, v, arrays, out, lse = residuals
    # An lse that nobody asks the gradient of is left out: of it kernels may have a pass more.
    asked = [not isinstance(x, jax.custom_derivatives.SymbolicZero) for x in cotangents]
    dout = _unless_empty(lse, cotangents[0]) if asked[0] else jnp.zeros_like(out)
    douts = (dout, jnp.where(lse == -jnp.inf, 0.0, cotangents[1])) if asked[1] else (dout,)
    S, acc = k.shape[-3], lse.dtype
    leaves, others = partition(arrays, is_inexact)

    def visit(step: Any, sums: Any, blocks: Result) -> tuple[Any, Result]:
        start = ring.source(step) * S
        mine, static = (ring.cut(x, S, start) for x in (leaves, combine(others, known)))

        def block(q: jax.Array, k: jax.Array, v: jax.Array, mine: Any) -> Any:
            spec = ring.of_step(combine(mine, static), step)
            return local(q, k, v, spec, (out, lse))[: len(douts)]

        def see(k: jax.Array, v: jax.Array) -> Any:
            dq, dk, dv, dmine = jax.vjp(block, q, k, v, mine)[1](douts)
            dq, dk, dv = (x.astype(acc) for x in (dq, dk, dv))
            return (dq, dmine), (dk, dv)

        def wide(x: jax.Array) -> jax.Array:
            return jnp.zeros_like(x, acc)

        zeros = (wide(q), jax.tree.map(jnp.zeros_like, mine)), jax.tree.map(wide, blocks)
        (dq, dmine), dkv = ring.where_seen(step, see, zeros, *blocks)
        add = functools.partial(_add, start=start)
        return (sums[0] + dq, jax.tree.map(add, sums[1], dmine)), dkv

    zeros = jnp.zeros(q.shape, acc), jax.tree.map(jnp.zeros_like, leaves)
    # The other way round: XLA would see that the same was sent before, and keep it all till now.
    steps = sorted(ring.steps, key=lambda step: -step % len(ring.seen))
    (dq, dleaves), dkv = ring.go(steps, visit, zeros, (k, v))
    dk, dv = dkv or (jnp.zeros_like(k), jnp.zeros_like(v))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dleaves


def _add(x: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    """X with a block of its last axis added; with all of it, if that is what the block is."""
    if block.shape == x.shape:
        return x + block
    block = block + lax.dynamic_slice_in_dim(x, start, block.shape[-1], axis=-1)
    return lax.dynamic_update_slice_in_dim(x, block, start, axis=-1)


_core.defvjp(_forward, _backward, symbolic_zeros=True)
