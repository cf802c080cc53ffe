"""Heads are really sharded over a mesh, and the numbers stay the same."""

import re

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import MultiHeadAttention, interop, sharding
from tests.support.meshes import KINDS, collectives

X = jax.device_put(np.random.default_rng(0).normal(size=(4, 6, 32)).astype(np.float32))


def make_mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


@pytest.fixture
def mesh():
    mesh = make_mesh()
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        yield mesh


def specs(tree) -> dict[str, P]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.sharding.spec
        for path, x in leaves
    }


def test_parameters_are_initialized_sharded(mesh) -> None:
    variables = sharding.init(MultiHeadAttention(8, num_kv_heads=4), jax.random.key(1), X)
    assert specs(variables["params"]) == {
        "key/bias": P("model", None),
        "key/kernel": P(None, "model", None),
        "out/bias": P(None),
        "out/kernel": P("model", None, None),
        "query/bias": P("model", None),
        "query/kernel": P(None, "model", None),
        "value/bias": P("model", None),
        "value/kernel": P(None, "model", None),
    }
    kernel = variables["params"]["query"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(32, 2, 4)}


class Repeated(nn.Module):
    """Flax's layer under a transformation without `metadata_params`."""

    transformation: str
    axis: int

    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": self.axis}, "split_rngs": {"params": True}}
        if self.transformation == "remat_scan":
            del options["split_rngs"]
            return nn.remat_scan(nn.MultiHeadDotProductAttention, (2, 3), **options)(8)(x)
        if self.transformation == "vmap":
            options |= {"in_axes": None, "axis_size": 3}
            return nn.vmap(nn.MultiHeadDotProductAttention, **options)(8)(x)
        layer = nn.MultiHeadDotProductAttention(8)
        return nn.scan(lambda m, x, _: (m(x), None), length=3, **options)(layer, x, None)[0]


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("transformation", ["scan", "vmap", "remat_scan"])
def test_transformed_layers_are_initialized_sharded(transformation, axis, kind) -> None:
    model = interop.swap(Repeated(transformation, axis))
    wanted = model.init(jax.random.key(1), X)
    with jax.set_mesh(make_mesh(KINDS[kind])), nn.logical_axis_rules(sharding.RULES):
        got = sharding.init(model, jax.random.key(1), X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    kernel = next(x for name, x in specs(got).items() if name.endswith("query/kernel"))
    at = {0: -2, 1: -2, -1: 1}[axis]
    assert kernel[at] == "model"
    assert sum(name is not None for name in kernel) == 1


@pytest.mark.sampled(0.25, slow=0.2)
@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_do_not_depend_on_the_mesh(kind: str) -> None:
    """Bitwise: a different program would round differently. Nor on how the input is sharded."""
    layer = MultiHeadAttention(8, head_dim=5)
    plain = sharding.init(layer, jax.random.key(1), X)
    mesh = make_mesh(KINDS[kind])
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        for x in (X, jax.device_put(X, P("data"))):
            sharded = sharding.init(layer, jax.random.key(1), x)
            jax.tree.map(np.testing.assert_array_equal, sharded, plain)


@pytest.mark.sampled(0.13, slow=0.2)
def test_layer_needs_exactly_one_all_reduce(mesh, optimized) -> None:
    """Each device computes its own heads. Only the output projection sums over devices."""
    layer = MultiHeadAttention(8)
    variables = sharding.init(layer, jax.random.key(1), X)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    text = jax.jit(layer.apply).lower(variables, x).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1
    assert not re.findall(r" (?:all-gather|all-to-all|collective-permute|reduce-scatter)", text)
    # 2 rows of the batch and 2 heads on each device.
    assert re.search(r"f32\[2,[26],[26],[26]\]", text)


@pytest.mark.parametrize("partitioned", [False, True])
def test_parameters_are_boxed_only_if_partitioned(partitioned: bool) -> None:
    layer = MultiHeadAttention(8, partitioned=partitioned)
    params = layer.init(jax.random.key(1), X)["params"]
    boxed = isinstance(params["query"]["kernel"], nn.LogicallyPartitioned)
    assert boxed == partitioned
    if partitioned:
        expected = P("embed", "heads", "head_dim")
        assert nn.get_partition_spec(params)["query"]["kernel"] == expected
    # The boxes do not change the output.
    plain = nn.meta.unbox(params)
    np.testing.assert_array_equal(
        layer.apply({"params": params}, X), MultiHeadAttention(8).apply({"params": plain}, X)
    )


def test_axis_names_survive_traces_cached_without_them(mesh) -> None:
    layer = MultiHeadAttention(8)
    init = jax.jit(layer.init)
    init(jax.random.key(1), X)
    shardings = sharding.of(init, jax.random.key(1), X)
    assert shardings["params"]["query"]["kernel"].spec == P(None, "model", None)
    assert isinstance(init(jax.random.key(1), X)["params"]["query"]["kernel"], jax.Array)


def test_box_of_user_initializer_is_kept() -> None:
    init = nn.with_partitioning(nn.initializers.ones, ("x", "y", "z"))
    params = MultiHeadAttention(8, kernel_init=init).init(jax.random.key(1), X)["params"]
    assert params["query"]["kernel"].names == ("x", "y", "z")
    assert params["query"]["kernel"].value.shape == (32, 8, 4)


def test_constrain_does_nothing_without_mesh_or_rules() -> None:
    names = ("batch", "length", None)
    assert sharding.constrain(X, names) is X
    with jax.set_mesh(make_mesh()):
        assert sharding.constrain(X, names) is X


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_constrain_shards_by_the_rules(kind: AxisType) -> None:
    with jax.set_mesh(make_mesh(kind)), nn.logical_axis_rules(sharding.RULES):
        y = jax.jit(lambda x: sharding.constrain(x, ("batch", "length", "mlp")))(X)
    assert y.sharding.spec == P("data", None, "model")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_axis_without_rule_keeps_its_sharding(kind: AxisType) -> None:
    """A rule (name, None) replicates the axis instead."""
    mesh = make_mesh(kind)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    rules = (("mlp", "model"),)
    for more, batch in (((), "data"), ((("batch", None),), None)):
        with jax.set_mesh(mesh), nn.logical_axis_rules((*rules, *more)):
            y = jax.jit(lambda x: sharding.constrain(x, ("batch", "length", "mlp")))(x)
        assert y.sharding.spec == P(batch, None, "model")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rules_for_heads_only_keep_rows_sharded(optimized, kind: AxisType) -> None:
    """Like the rules of Flax's examples, which lack flax_mha's other names."""
    mesh, layer = make_mesh(kind), MultiHeadAttention(8, num_kv_heads=4)
    with (
        jax.set_mesh(mesh),
        nn.logical_axis_rules((("activation_batch", "data"), ("heads", "model"))),
    ):
        variables = sharding.init(layer, jax.random.key(1), X)
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        compiled = jax.jit(layer.apply).lower(variables, x).compile()
    assert specs(variables["params"])["value/kernel"] == P(None, "model", None)
    assert collectives(compiled.as_text()) == [("all-reduce", 4 * X.size // 2)]
    assert compiled.output_shardings.spec[0] == "data"


@pytest.mark.sampled(0.16)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_unsharded_parameters_work_outside_jit(kind: AxisType) -> None:
    layer = MultiHeadAttention(8)
    variables = layer.init(jax.random.key(1), X)
    expected = layer.apply(variables, X)
    with jax.set_mesh(make_mesh(kind)), nn.logical_axis_rules(sharding.RULES):
        np.testing.assert_allclose(layer.apply(variables, X), expected, atol=1e-5)


def test_constrain_leaves_manual_axes_alone() -> None:
    def local(x: jax.Array) -> jax.Array:
        assert sharding.constrain(x, ("batch", "length", "mlp")) is x
        return x

    with jax.set_mesh(make_mesh(AxisType.Explicit)), nn.logical_axis_rules(sharding.RULES):
        jax.jit(jax.shard_map(local, in_specs=P("data"), out_specs=P("data")))(
            jax.device_put(X, P("data"))
        )
