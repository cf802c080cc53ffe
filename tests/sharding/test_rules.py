"""Logical axis rules, resolved on abstract meshes."""

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec as P

from flax_mha.sharding import products, rules


def test_unconstrained_axes_take_what_is_free() -> None:
    spec = rules.fill_unconstrained(P(P.UNCONSTRAINED, "a"), (("a", "b"), None))
    assert spec == P("b", "a")


def test_positions_between_layers_are_gathered_over_their_own_axes_only() -> None:
    mesh = jax.sharding.AbstractMesh((2, 2), ("context", "model"))
    axis_rules = [("length", "context"), ("norm_length", ("context", "model"))]
    with jax.sharding.use_abstract_mesh(mesh), nn.logical_axis_rules(axis_rules):
        assert products._sequence_axes((4, 16, 8), 1) == ("model",)


def test_decoding_shards_no_tokens() -> None:
    axis_rules = [("length", "a"), ("norm_length", "b"), ("heads", "c")]
    with nn.logical_axis_rules(axis_rules), rules.undivided_tokens(True):
        assert dict(nn.get_logical_axis_rules()) == {
            "length": None, "norm_length": None, "heads": "c",
        }  # fmt: skip


def test_heads_of_keys_follow_those_of_queries_over_the_axes_that_divide_them() -> None:
    mesh = jax.sharding.AbstractMesh((2, 2), ("outer", "inner"))
    with nn.logical_axis_rules([("heads", ("outer", "inner"))]):
        for heads, axes in ((4, ("outer", "inner")), (2, "outer"), (3, None)):
            assert rules.resolve_spec((8, heads), (None, "kv_heads"), mesh) == P(None, axes)
    with nn.logical_axis_rules([("heads", "outer"), ("kv_heads", None)]):
        assert rules.resolve_spec((8, 4), (None, "kv_heads"), mesh) == P(None, None)
