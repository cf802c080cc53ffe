"""Ring attention: queries stay on their device, keys and values pass around the devices.

Each of n devices holds a block of queries and a block of keys. In step s, device i attends to the
keys of device i − s while it sends them on, and merges the results by their maximum scores and sums
of exponentials (see `softmax.merge`). So it holds one block and its neighbor at a time.

Steps in which the static mask lets no device see a key are left out. A device computes nothing in a
step whose tiles are all empty. If the last step of a window sees only a part of each block, only
this part is sent (see `legs.split`). The backward pass goes around again from the merged out and
sums. The gradients of a block travel with it and return home, summed in float32.

Sources: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023; the merge is
from Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
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
from flax_mha.kernels.call.mask_parts import conjuncts
from flax_mha.kernels.call.spec import AttentionSpec, Result, Sums, name_result
from flax_mha.kernels.choose import Explanation
from flax_mha.kernels.mesh.legs import Pass, schedule, split
from flax_mha.kernels.xla import softmax
from flax_mha.kernels.xla.tile_plan import visible_tiles
from flax_mha.kernels.xla.tiles import empty_result
from flax_mha.masks import And, Causal

# A device's attention, (q, k, v, spec, result) -> (out, sums). Given a precomputed result of these
# and other keys, it returns that result, with the gradients of these keys.
Attend = Callable[..., Result]


class Ring(NamedTuple):
    """The devices of a ring, and the steps that need work.

    Attributes:
      axes: the mesh axes that shard queries and keys.
      seen: bool [n, n], True if queries of a device can see keys of another.
      steps: the ring offsets that need work, ascending.
      passes: the steps by the keys that they need: whole blocks, or a part.
      block: the number of keys of a device.
      traced: True if a device must find empty steps itself, because the mask or positions are
        traced.
      plain: True if the blocks of other devices are full or empty, as under a causal mask. A step
        then needs no positions, so that cuDNN can compute it.
      serial: True if transfers must wait for a loop of others, because XLA:CPU mixes up their data.
    """

    axes: Any
    seen: np.ndarray
    steps: tuple[int, ...]
    passes: tuple[Pass, ...]
    block: int
    traced: bool = False
    plain: bool = False
    serial: bool = False

    @classmethod
    def of(cls, axes: Any, n: int, spec: AttentionSpec, dims: Dims) -> "Ring":
        """Return the ring of n devices for a call with these full sizes and spec."""

        def is_traced(tree: Any) -> bool:
            return any(isinstance(x, jax.Array) for x in jax.tree.leaves(tree))

        parts, positions = conjuncts(spec.mask), (spec.q_pos, spec.k_pos)
        static = [] if is_traced(positions) else [x for x in parts if not is_traced(x)]
        visible, block = np.ones((n, n), bool), dims.S // n
        if static:
            visible = np.asarray(visible_tiles(spec.replace(mask=And(tuple(static))), dims, n))
        per_device = visible.reshape(n, len(visible) // n, n, -1)
        # Only on GPUs, because the kernels of other platforms take positions.
        others = *positions, spec.dropout, *spec.scores
        plain = dims.T == dims.S and others == (None,) * 3 and spec.platform.name == "gpu"
        plain &= spec.mask is None or type(spec.mask) is Causal
        device, tile, reach = np.arange(n), block // per_device.shape[-1], {}
        for step in range(n):
            tiles = np.flatnonzero(per_device[device, :, device - step].any((0, 1)))
            if len(tiles):
                reach[step] = int(tiles[0]) * tile, int(tiles[-1] + 1) * tile
        passes, is_partly_traced = split(reach, block, n), len(static) < len(parts)
        seen = per_device.any((1, 3))
        loops = any(len(steps) > 1 for part in passes for steps, *_ in schedule(part.steps, n))
        serial = loops and spec.platform.name == "cpu"
        return cls(axes, seen, tuple(reach), passes, block, is_partly_traced, plain, serial)

    def send(self, tree: Any, hop: int) -> Any:
        """Shift arrays `hop` devices forward."""
        n = len(self.seen)
        if hop % n == 0:
            return tree
        pairs = [(i, (i + hop) % n) for i in range(n)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), tree)

    def wait(self, tree: Any, *before: Any) -> Any:
        """Return arrays to send. If transfers must not run at once, others come before."""
        return lax.optimization_barrier((tree, before))[0] if self.serial else tree

    def source(self, step: Array | int) -> jax.Array:
        """Return the device whose keys this device holds in a step."""
        return (lax.axis_index(self.axes) - step) % len(self.seen)

    def start(self, part: Pass, step: Array | int) -> jax.Array:
        """Return the first key that this device holds in a step of a pass, of all keys."""
        return self.source(step) * self.block + part.start

    def cut(self, tree: Any, part: Pass, step: Array | int) -> Any:
        """Slice the arrays over all keys to those that this device holds in a step of a pass."""
        n, start = len(self.seen), self.start(part, step)

        def cut(x: Array) -> Array:
            if x.shape[-1] != n * self.block or n == 1:
                return x
            return lax.dynamic_slice_in_dim(jnp.asarray(x), start, part.stop - part.start, axis=-1)

        return map_score_arrays(cut, tree)

    def spec_at(self, spec: AttentionSpec, step: Array | int) -> AttentionSpec:
        """Return the spec for the keys of a step, without a mask if all are visible."""
        if not self.plain:
            return spec
        is_home = isinstance(step, int) and step == 0
        return spec.replace(mask=spec.mask if is_home else None, q_pos=None, k_pos=None)

    def where_seen(
        self, part: Pass, step: Any, spec: AttentionSpec, dims: Dims, fn: Callable[..., Any],
        otherwise: Any, *args: Any,
    ) -> Any:  # fmt: skip
        """Return fn(*args) on devices that see a key in a step, `otherwise` on others.

        Each device decides for itself, so fn has no collectives. The spec covers the device's
        queries and all keys, and dims are the sizes of a block.
        """
        seen: Any = True
        if not self.seen.all():
            seen = jnp.asarray(self.seen)[lax.axis_index(self.axes), self.source(step)]
        if self.traced:
            spec = spec.replace(scores=(), dropout=None)
            dims = dims._replace(S=part.stop - part.start)
            seen &= visible_tiles(self.cut(spec, part, step), dims, 1).any()
        is_known = not isinstance(seen, jax.Array)
        return fn(*args) if is_known else lax.cond(seen, fn, lambda *_: otherwise, *args)

    def run(
        self, visit: Callable[..., Any], state: Any, blocks: Any, *, backward: bool = False
    ) -> tuple[Any, Any]:
        """Run state, sums = visit(part, step, state, blocks) in all steps of all passes.

        The backward order is the opposite one: in the forward order XLA would reuse the forward
        pass's transfers, and keep every block in memory.

        Returns:
          The last state, and for each device's own blocks the sums over the steps, if any.
        """
        total: Any = None
        for part in reversed(self.passes) if backward else self.passes:
            steps, visit_part = part.steps, functools.partial(visit, part)
            if backward:
                steps = tuple(sorted(steps, key=lambda step: -step % len(self.seen)))
            state, sums = self._run_pass(steps, visit_part, state, jax.tree.map(part.of, blocks))
            if sums is not None:
                sums = jax.tree.map(lambda x, part=part: part.pad(x, self.block), sums)
                total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        return state, total

    def _run_pass(
        self, steps: Sequence[int], visit: Callable[..., Any], state: Any, blocks: Any
    ) -> tuple[Any, Any]:
        """Run the steps of one pass, as `run` does, while the blocks pass around."""
        add = functools.partial(jax.tree.map, jnp.add)

        def run_step(hop: int, following: int, carry: Any, step: Any) -> tuple[Any, None]:
            state, blocks, sums = carry
            # Send before computing, so that both can overlap.
            next_blocks = self.send(blocks, following)
            sums = self.send(sums, hop)
            state, new = visit(step, state, blocks)
            # Else XLA may send all blocks before the first step, and keep all of them.
            state, next_blocks, new = lax.optimization_barrier((state, next_blocks, new))
            return (state, next_blocks, new if sums is None else add(new, sums)), None

        # Of a device's own blocks, and of the blocks that pass around.
        own_sums: Any = None
        sums: Any = None
        blocks = self.send(self.wait(blocks, state), steps[0] if steps else 0)
        for leg, hop, following in schedule(steps, len(self.seen)):
            carry, run_leg = (state, blocks, sums), functools.partial(run_step, hop, following)
            if len(leg) > 1:
                carry, _ = lax.scan(run_leg, carry, np.array(leg))
            else:
                carry, _ = run_leg(carry, leg[0])
            state, blocks, sums = carry
            if leg[0] == 0:
                own_sums, sums = sums, None
        if sums is not None:
            sums = self.send(sums, -steps[-1])
            own_sums = sums if own_sums is None else add(own_sums, sums)
        return state, own_sums


def attend(
    ring: Ring, local: Attend, q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec
) -> Result:
    """Attend from this device's queries to the keys of all devices, inside `jax.shard_map`.

    q is [*B, T/n, N, H], k and v are [*B, S/n, K, ·]. `local` attends to one block of keys. The
    spec is of this device's queries and all S keys. Returns out [*B, T/n, N, Hv] and sums [*B, N,
    T/n].
    """
    arrays, static = partition(spec.replace(sinks=None), is_array)
    result = _core(ring, local, static, q, k, v, arrays)
    return result if spec.sinks is None else softmax.merge_sinks(result, spec.sinks)


def explain(
    ring: Ring, local: Callable[..., Explanation], q: jax.Array, k: Any, v: Any, spec: AttentionSpec
) -> Explanation:
    """Return the explanation of `local` for the first block of keys of this device."""
    part = next((x for x in ring.passes if x.steps), ring.passes[0])
    step = part.steps[0] if part.steps else 0
    spec = ring.cut(spec.replace(sinks=None), part, step)
    return local(q, part.of(k), part.of(v), ring.spec_at(spec, step))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _core(
    ring: Ring, local: Attend, static_leaves: Any, q: jax.Array, k: jax.Array, v: jax.Array,
    arrays: Any,
) -> Result:  # fmt: skip
    """Compute `attend` without sinks, for the static and the array leaves of a spec."""
    dims = shapes.Dims.of(q, k, v)
    spec = combine(arrays, static_leaves)

    def visit(part: Pass, step: Any, merged: Result, blocks: Any) -> tuple[Result, tuple[()]]:
        def attend_visible(k: jax.Array, v: jax.Array) -> Result:
            block = ring.cut(spec, part, step)
            return softmax.merge(merged, local(q, k, v, ring.spec_at(block, step)))

        return ring.where_seen(part, step, spec, dims, attend_visible, merged, *blocks), ()

    empty = empty_result(dims, shapes.wide(q.dtype), None)
    (out, sums), _ = ring.run(visit, empty, (k, v))
    return out.astype(q.dtype), sums


def _forward(ring: Ring, local: Attend, static_leaves: Any, *primals: Any) -> tuple[Result, Any]:
    q, k, v, arrays = jax.tree.map(lambda x: x.value, primals)
    out, sums = name_result(*_core(ring, local, static_leaves, q, k, v, arrays))
    return (out, sums), (q, k, v, arrays, out, sums)


def _backward(
    ring: Ring, local: Attend, static_leaves: Any, residuals: Any, cotangents: Result
) -> tuple[Any, ...]:
    q, k, v, arrays, out, whole = residuals
    # Leave out sums without a cotangent: their gradient may take another pass of the kernel.
    dout, (_, dtotal) = cotangents
    is_zero = [isinstance(x, jax.custom_derivatives.SymbolicZero) for x in (dout, dtotal)]
    dout = jnp.zeros_like(out) if is_zero[0] else softmax.zero_empty(whole, dout)
    douts: tuple[Any, ...] = (dout,)
    if not is_zero[1]:
        douts += (Sums(jnp.zeros_like(dtotal), jnp.where(whole.total == 0, 0.0, dtotal)),)
    dims, acc = shapes.Dims.of(q, k, v), whole.total.dtype
    leaves, others = partition(arrays, is_inexact)

    def visit(part: Pass, step: Any, sums: Any, blocks: Any) -> tuple[Any, Result]:
        learned, static = (
            ring.cut(x, part, step) for x in (leaves, combine(others, static_leaves))
        )

        def block(q: jax.Array, k: jax.Array, v: jax.Array, learned: Any) -> Any:
            spec = ring.spec_at(combine(learned, static), step)
            return local(q, k, v, spec, (out, whole))[: len(douts)]

        def attend_visible(k: jax.Array, v: jax.Array) -> Any:
            dq, dk, dv, dlearned = jax.vjp(block, q, k, v, learned)[1](douts)
            dq, dk, dv = (x.astype(acc) for x in (dq, dk, dv))
            return (dq, dlearned), (dk, dv)

        wide = functools.partial(jnp.zeros_like, dtype=acc)
        zeros = (wide(q), jax.tree.map(jnp.zeros_like, learned)), jax.tree.map(wide, blocks)
        spec = combine(arrays, static_leaves)
        grads, dkv = ring.where_seen(part, step, spec, dims, attend_visible, zeros, *blocks)
        add = functools.partial(_add, start=ring.start(part, step))
        return jax.tree.map(add, sums, grads), dkv

    zeros = jnp.zeros(q.shape, acc), jax.tree.map(jnp.zeros_like, leaves)
    k, v = ring.wait((k, v), whole, douts)
    (dq, dleaves), dkv = ring.run(visit, zeros, (k, v), backward=True)
    dk, dv = dkv or (jnp.zeros_like(k), jnp.zeros_like(v))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dleaves


def _add(x: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    """Add a block to x, or to a slice of its last axis."""
    if block.shape == x.shape:
        return x + block
    block = block + lax.dynamic_slice_in_dim(x, start, block.shape[-1], axis=-1)
    return lax.dynamic_update_slice_in_dim(x, block, start, axis=-1)


_core.defvjp(_forward, _backward, symbolic_zeros=True)
