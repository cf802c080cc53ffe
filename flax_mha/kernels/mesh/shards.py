"""Attention on shards: each device of the ambient mesh runs a kernel on its part of a call.

The logical axis rules shard batch rows and heads (see `flax_mha.sharding`), and `jax.shard_map`
gives each device's arrays to a kernel. If `length` is sharded, a call uses one of the
context-parallel `STRATEGIES` (see `strategies`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from flax_mha import sharding
from flax_mha.base.coordinates import ScoreArray, is_score_array, map_score_arrays, whole
from flax_mha.base.shapes import Dims, wide
from flax_mha.base.trees import combine, is_array, partition
from flax_mha.kernels import choose
from flax_mha.kernels.call.spec import AttentionSpec, Result, Sums
from flax_mha.kernels.call.stored import Stored, is_part, read
from flax_mha.kernels.choose import Explanation
from flax_mha.kernels.mesh import ring, slots
from flax_mha.kernels.mesh.strategies import pick_strategy, refusals
from flax_mha.sharding import layout, rules, shard_map
from flax_mha.sharding.devices import Platform, current_platform
from flax_mha.sharding.order import piece_size
from flax_mha.sharding.rules import pack_entry, unpack_entry

_SUMS: Any = ("batch", "heads", "length")


class Division(NamedTuple):
    """The mesh axes that a call is sharded over, each as an entry of a `PartitionSpec`.

    Attributes:
      batch: the entries of the batch axes.
      length: the entry of the queries.
      heads: the entry of the query heads.
      kv_heads: the entry of the key/value heads, a leading part of `heads`, which devices along the
        remaining axes of `heads` share.
      slots: the entry of the keys, if they are a cache's slots.
      manual: all mesh axes of `jax.shard_map`. XLA shards over the others.
    """

    batch: tuple[Any, ...]
    length: Any
    heads: Any
    kv_heads: Any
    slots: Any
    manual: set[str]

    @classmethod
    def of(cls, q: jax.Array, k: Any) -> "Division | None":
        """Return the division of q and k on the ambient mesh, or None to not shard."""
        keys = k.slots if isinstance(k, Stored) else "length"
        of_keys = ("batch", keys, "kv_heads", "head_dim")
        by_rule = sharding.spec(q.shape, sharding.HEADS), sharding.spec(k.shape, of_keys)
        mesh, manual = shard_map.ambient_mesh(), layout.manual_axes(by_rule)
        if not manual and not jax.sharding.get_abstract_mesh().explicit_axes:
            return None
        *batch, length, heads, _ = rules.fill_unconstrained(by_rule[0], layout.spec_of(q))
        *_, of_slots, kv_heads, _ = by_rule[1]
        over = () if keys == "length" else unpack_entry(of_slots)
        if over:
            # Devices with other slots compute the same queries and heads.
            length, heads = None, pack_entry([a for a in unpack_entry(heads) if a not in over])
        if kv_heads is rules.UNCONSTRAINED:
            kv_heads = rules.leading_axes(heads, k.shape[-2], mesh)
        leading = unpack_entry(kv_heads)
        if leading != unpack_entry(heads)[: len(leading)]:
            raise ValueError(
                f"query heads are sharded over {heads!r} and key/value heads over {kv_heads!r}; "
                f"give both the same rule, or key/value heads the first axes of it, or None"
            )
        return cls(tuple(batch), length, heads, kv_heads, pack_entry(over), manual)

    @property
    def devices(self) -> int:
        """The number of devices that the queries are sharded over."""
        return _devices(self.length)

    def by_heads(self, moved: int) -> "Division":
        """Return the division with the last `moved` mesh axes of positions sharding heads instead.

        The last axes are the minor ones, so a device's positions stay consecutive.
        """
        if moved == 0:
            return self
        axes = unpack_entry(self.length)
        heads = (*unpack_entry(self.heads), *axes[-moved:])
        return self._replace(length=pack_entry(axes[:-moved]), heads=heads, kv_heads=heads)

    def inside(self, strategy: str | None, dims: Dims) -> "Division":
        """Return the division inside a strategy's attention.

        `usp` moves the most mesh axes over which heads divide, and at least one stays.
        """
        n = len(unpack_entry(self.length))
        moves = {"ulysses": [n], "usp": range(n - 1, 0, -1)}.get(strategy or "") or [0]
        divisions = [self.by_heads(moved) for moved in moves]
        return next((x for x in divisions if x.divides_heads(dims)), divisions[-1])

    @property
    def head_devices(self) -> int:
        """The number of devices that the query heads are sharded over."""
        return _devices(self.heads)

    def divides_heads(self, dims: Dims) -> bool:
        """Return True if the query and key/value heads divide over the mesh axes of heads."""
        return dims.N % self.head_devices == 0 and dims.K % self.head_devices == 0

    def over_queries(self) -> P:
        """Return the PartitionSpec of queries and outputs [*B, T, N, H]."""
        return P(*self.batch, self.length, self.heads, None)

    def over_sums(self) -> P:
        """Return the PartitionSpec of the sums [*B, N, T]."""
        return P(*self.batch, self.heads, self.length)

    def over_scores(self, shape: tuple[int, ...]) -> P:
        """Return the PartitionSpec of an array over the scores. Axes of 1 are replicated."""
        axes = (*self.batch, self.heads, self.length, self.slots)
        return P(*(None if size == 1 else axis for size, axis in zip(shape, axes, strict=True)))


def _devices(axes: Any) -> int:
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return math.prod(sizes[axis] for axis in unpack_entry(axes))


def run(
    kernel: str, division: Division, q: jax.Array, k: Any, v: Any, spec: AttentionSpec
) -> Result:
    """Compute a call by a kernel, each device on its shard.

    `kernel` is a kernel's name, "auto", or a strategy, as in `choose.parse_kernel`. q is
    [*B, T, N, H], k and v are [*B, S, K, ·].
    """
    _, name = choose.parse_kernel(kernel)
    attend: Any = Partial(choose.run, name)
    if _is_empty(q, k):
        # XLA does not support empty shards.
        return sharding.auto(attend, (sharding.HEADS, Sums(_SUMS, _SUMS)), q, k, v, spec)
    dims = Dims.of(q, k, v)
    strategy = pick_strategy(kernel, spec.normalizer, division, dims)
    spec = spec.replace(platform=current_platform(division.manual))
    if division.slots is not None:
        attend = Partial(slots.attend, division.slots, attend)
    divided = division.inside(strategy, dims)
    inside, ins, args = _shard_call(attend, ring.attend, strategy, divided, q, k, v, spec)
    outs = divided.over_queries(), divided.over_sums()
    pure = not spec.user_types()
    out, sums = shard_map.run_on_shards(inside, divided.manual, ins, outs, *args, pure=pure)
    out = layout.reshard(out, division.over_queries())
    sums = (layout.reshard(x, division.over_sums()) for x in sums)
    sums = Sums(*(sharding.constrain(x, _SUMS) for x in sums))
    return sharding.constrain(out, sharding.HEADS), sums


def explain(
    kernel: str, q: jax.Array, k: Any, v: Any, spec: AttentionSpec, platform: Platform | None
) -> Explanation:
    """Return the explanation of `run`, for a platform or the current one.

    For `ring` and `usp`, it explains the first block of keys.
    """
    named, name = choose.parse_kernel(kernel)
    division = Division.of(q, k)
    manual = () if division is None or _is_empty(q, k) else division.manual
    spec = spec.replace(platform=platform or current_platform(manual))
    if division is None:
        return choose.explain(name, q, k, v, spec)
    dims = Dims.of(q, k, v)
    refused = refusals(kernel, spec.normalizer, division, dims)
    if named in refused:
        return Explanation(None, refused)
    strategy = pick_strategy(kernel, spec.normalizer, division, dims)
    explain_shard = Partial(choose.explain, name)
    if _is_empty(q, k):
        explanation = explain_shard(q, k, v, spec)
    else:
        divided = division.inside(strategy, dims)
        inside, ins, args = _shard_call(
            explain_shard, ring.explain, strategy, divided, q, k, v, spec
        )
        explanation = shard_map.run_on_shards(inside, divided.manual, ins, P(), *args)
    return explanation._replace(refused=explanation.refused | refused, strategy=strategy)


def _is_empty(q: jax.Array, k: Any) -> bool:
    return 0 in q.shape or k.shape[-3] == 0


def _shard_call(
    attend: Callable[..., Any], attend_ring: Callable[..., Any], strategy: str | None,
    division: Division, q: jax.Array, k: Any, v: Any, spec: AttentionSpec,
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Return attend(q, k, v, spec) as a function of shards, their PartitionSpecs, and the arrays.

    On a ring of devices, the function is attend_ring(ring, attend, q, k, v, spec).
    """
    dims, by_ring = Dims.of(q, k, v), strategy in ("ring", "usp")
    if strategy is not None:
        # Before tokens move to other devices.
        q, k, spec = spec.turned(q, k)
    if by_ring:
        devices = ring.Ring.of(division.length, division.devices, spec, dims)
        attend = Partial(attend_ring, devices, attend)
        if spec.q_pos is not None:
            size = piece_size(dims.T // division.devices, division.devices, spec.q_pos.array)
            spec = spec.replace(piece=size)
    sinks = spec.sinks
    by_key = by_ring or division.slots is not None
    spec = spec.replace(sinks=None, reads_lse=spec.reads_lse or by_key)
    spec = _add_positions(spec, dims, division, by_key)
    if not isinstance(q, jax.core.Tracer):
        # Outside jit, positions and lengths of other values are no other program.
        spec = map_score_arrays(jnp.asarray, spec)
    arrays, axes, static = _split_spec(spec, division)
    dtypes = jax.tree.map(lambda x: x.dtype, (k, v))
    shares_kv = division.kv_heads != division.heads
    inside = Partial(_inside, attend, static, dtypes, shares_kv, dims.G)
    over_q = division.over_queries()
    keys = division.length if by_ring else division.slots
    over_k = P(*division.batch, keys, division.kv_heads, None)
    q = layout.reshard(q, over_q)
    # The scales of stored keys and values are sharded as the values.
    of_k, of_v = jax.tree.map(
        lambda x: x.replace(stack=P(None, *over_k), layer=P()) if is_part(x) else over_k, (k, v),
        is_leaf=is_part,
    )  # fmt: skip
    k, v = jax.tree.map(layout.reshard, (k, v), (of_k, of_v))
    if division.manual - {axis for axes in over_k for axis in unpack_entry(axes)}:
        # Devices that read the same keys sum their gradients. Sum in float32, because in half
        # precision each device would round the sum. The gather above stays in half precision.
        k, v = (x.astype(wide(x.dtype)) if is_array(x) else x for x in (k, v))
    by_head = P(division.heads)
    sinks = None if sinks is None else layout.reshard(sinks, by_head)
    return inside, (over_q, of_k, of_v, by_head, axes), (q, k, v, sinks, arrays)


def _inside(
    attend: Callable[..., Any], static: AttentionSpec, dtypes: Any, shares_kv: bool, G: int,
    q: jax.Array, k: Any, v: Any, sinks: Any, arrays: Any,
) -> Any:  # fmt: skip
    """Return attend(q, k, v, spec) on a device, whose spec has these static parts and arrays."""
    spec = combine(arrays, static, is_score_array).replace(sinks=sinks)
    k, v = jax.tree.map(lambda x, dtype: x.astype(dtype), (k, v), dtypes)
    if spec.head_ids is not None and shares_kv:
        k, v = _take_kv_heads(k, v, spec.head_ids.array.reshape(-1), G)
    return attend(q, k, v, spec)


def _add_positions(
    spec: AttentionSpec, dims: Dims, division: Division, by_key: bool
) -> AttentionSpec:
    """Return the spec with the coordinates that a device cannot derive from its shard."""
    at = whole(dims)
    if any(axes is not None for axes in division.batch):
        spec = spec.replace(row_ids=ScoreArray(at.row))
    if division.heads is not None:
        spec = spec.replace(head_ids=ScoreArray(at.head))
    if division.length is not None and spec.q_pos is None:
        spec = spec.replace(q_pos=ScoreArray(at.q))
    if by_key and spec.k_pos is None:
        spec = spec.replace(k_pos=ScoreArray(at.k))
    return spec


def _split_spec(spec: AttentionSpec, division: Division) -> tuple[Any, Any, AttentionSpec]:
    """Return the arrays of a spec without sinks, their PartitionSpecs, and its static part.

    NumPy arrays that are equal on all shards belong to the static part.
    """

    def layout_of(x: Any) -> P | None:
        if not is_score_array(x):
            return P() if is_array(x) else None
        axes = division.over_scores(x.array.shape)
        is_replicated = isinstance(x.array, np.ndarray) and all(axis is None for axis in axes)
        return None if is_replicated else axes

    def reshard(x: Any, axes: P) -> Any:
        return jax.tree.map(lambda x: layout.reshard(jnp.asarray(x), axes), x)

    arrays, static = partition(spec, lambda x: layout_of(x) is not None, is_score_array)
    axes = jax.tree.map(layout_of, arrays, is_leaf=is_score_array)
    return jax.tree.map(reshard, arrays, axes, is_leaf=is_score_array), axes, static


def _take_kv_heads(k: Any, v: Any, heads: jax.Array, G: int) -> Any:
    """Return those of a device's key/value heads that its query heads read, in groups of G."""
    n, K = len(heads), k.shape[-2]
    if K == 1 or n == K * G:
        # Picking would copy a cache.
        return k, v
    if n % G == 0:
        heads = heads[::G]
    elif G % n == 0:
        heads = heads[:1]
    # Otherwise shards cut groups apart, and each query head gets a copy.
    kv_heads = heads // G % K
    return jax.tree.map(lambda x: jnp.take(read(x), kv_heads, axis=-2), (k, v), is_leaf=is_part)
