"""Sharding by logical axis names.

Each axis of an array has a logical name. Rules such as `RULES` map the names to mesh axes.
The mesh is the ambient one (`jax.set_mesh`), the rules are Flax's (`nn.logical_axis_rules`):

>>> with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
...     variables = sharding.init(model, rng, x)  # initialized sharded
...     y = jax.jit(model.apply)(variables, x)
"""

from flax_mha.base.tensors import HEADS, KV_HEADS
from flax_mha.sharding.devices import platform
from flax_mha.sharding.layout import auto, constrain, like, local, spec
from flax_mha.sharding.named_parameters import Named, init, name, named, of
from flax_mha.sharding.order import balanced, zigzag
from flax_mha.sharding.rules import LogicalNames
from flax_mha.sharding.shard_map import varying

__all__ = [
    "HEADS", "KV_HEADS", "RULES", "LogicalNames", "Named", "auto", "balanced", "constrain", "init",
    "like", "local", "name", "named", "of", "platform", "spec", "varying", "zigzag",
]  # fmt: skip
__dir__ = __all__.copy

RULES: tuple[tuple[str, str | None], ...] = (
    ("batch", "data"),  # data parallel
    ("heads", "model"),  # tensor parallel: each device computes whole heads
    ("kv_heads", "model"),
    ("mlp", "model"),
    ("experts", None),  # expert parallel: the axis of tokens (`data`), or one of its own
    ("vocab", "model"),
    ("embed", None),  # FSDP: a mesh axis here shards every parameter over it
    ("length", None),
    ("norm_length", None),  # sequence parallel: the axis of `heads` also shards norms and residuals
    ("cache_length", None),  # a mesh axis that does not shard key/value heads
    ("head_dim", None),
    ("layers", None),
)
