"""A kernel that XLA can't divide, run on the shards that each device of the ambient mesh holds."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flax_mha.shapes import Dims


class Spread(NamedTuple):
    """Which mesh axes divide what.

    Attributes:
      rows: of the batch: those of the logical name `batch`.
      heads: of queries, keys and values: those of `heads` and `kv_heads`.
      names: all axes that are divided by XLA otherwise; none on a single device.
    """

    rows: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, dims: Dims) -> "Spread | str":
        """How the rules lay a call out on the ambient mesh, or the reason why it can't be."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            if jax.device_count() == 1:
                return cls()
            return (
                f"XLA can't divide it between the {jax.device_count()} devices by itself; wrap in "
                f"`with jax.set_mesh(mesh)`, of one device or with rules (see flax_mha.sharding)"
            )
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        free = {name for name, kind in kinds.items() if kind != AxisType.Manual and sizes[name] > 1}
        if not free:
            return cls()
        if any(kinds[name] == AxisType.Explicit for name in free):
            return "it runs on meshes with Auto axes, not Explicit ones"
        rules = nn.get_logical_axis_rules()
        if not rules:
            return "the mesh has no rules; wrap in `with nn.logical_axis_rules(sharding.RULES)`"
        rows, heads, kv_heads = (
            tuple(axis for axis in _axes(name, rules) if axis in free)
            for name in ("batch", "heads", "kv_heads")
        )
        if heads != kv_heads or set(heads) & set(rows):
            return f"the rules give heads {heads}, kv_heads {kv_heads} and batch {rows}"
        for what, size, axes in (
            ("rows of the batch", math.prod(dims.B), rows),
            ("key/value heads", dims.K, heads),
        ):
            devices = math.prod(sizes[name] for name in axes)
            if size % devices:
                return f"{size} {what} do not divide over the {devices} devices of {axes}"
        return cls(rows, heads, frozenset(free))

    def spec(self, rows: bool, heads: bool) -> P:
        """The layout of an array [rows|1, heads|1, ...]."""
        return P(self.rows if rows else None, self.heads if heads else None)

    def run(self, fn: Callable, q: Any, k: Any, v: Any, sinks: Any, ids: Any) -> Any:
        """Runs fn on the shards, of heads [rows, heads, ·, ·], sinks [heads], ids [rows, ·].

        It gives (out [rows, heads, ·, ·], lse [rows, heads, ·]).
        """
        both = self.spec(True, True)
        specs = (both, both, both, P(self.heads), P(self.rows))
        return self.call(fn, specs, q, k, v, sinks, ids)

    def call(self, fn: Callable, specs: Any, *args: Any) -> Any:
        """Likewise, of arguments with layouts of their own."""
        if not self.names:
            return fn(*args)
        both = self.spec(True, True)
        return jax.shard_map(
            fn, in_specs=specs, out_specs=(both, both), axis_names=set(self.names), check_vma=False
        )(*args)


def _axes(name: str, rules: Any) -> tuple[str, ...]:
    (axes,) = nn.logical_to_mesh_axes((name,), rules) or (None,)
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
