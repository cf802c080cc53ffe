"""Heads are really sharded over a mesh, and the numbers stay the same."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import MultiHeadAttention, interop, sharding
from tests.support.meshes import KINDS, collectives, described, on

X = np.random.default_rng(0).normal(size=(4, 6, 32)).astype(np.float32)
KEY = jax.random.key(1)


def specs(tree) -> dict[str, P]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.sharding.spec
        for path, x in leaves
    }


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_do_not_depend_on_the_mesh(kind: str) -> None:
    """Values are bitwise equal, and do not depend on the input's sharding either."""
    layer = MultiHeadAttention(8, num_kv_heads=4, head_dim=5)
    plain = sharding.init(layer, KEY, X)
    with on(kind):
        sharded = [sharding.init(layer, KEY, x) for x in (X, jax.device_put(X, P("data")))]
    for each in sharded:
        jax.tree.map(np.testing.assert_array_equal, each, plain)
    assert specs(sharded[0]["params"]) == {
        "out/bias": P(None),
        "out/kernel": P("model", None, None),
        **{
            f"{name}/{leaf}": spec
            for name in ("query", "key", "value")
            for leaf, spec in (("bias", P("model", None)), ("kernel", P(None, "model", None)))
        },
    }
    kernel = sharded[0]["params"]["query"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(32, 2, 5)}


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


@pytest.mark.sampled(0.072)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("transformation", ["scan", "vmap", "remat_scan"])
def test_transformed_layers_are_initialized_sharded(transformation, axis, kind) -> None:
    model = interop.swap(Repeated(transformation, axis))
    wanted = jax.jit(model.init)(KEY, X)
    with on(kind):
        got = sharding.init(model, KEY, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    kernel = next(x for name, x in specs(got).items() if name.endswith("query/kernel"))
    at = {0: -2, 1: -2, -1: 1}[axis]
    assert kernel[at] == "model"
    assert sum(name is not None for name in kernel) == 1


def test_parameters_are_boxed_only_if_partitioned() -> None:
    init = nn.with_partitioning(nn.initializers.ones, ("x", "y", "z"))
    for layer, names in (
        (MultiHeadAttention(8), None),
        (MultiHeadAttention(8, partitioned=True), P("embed", "heads", "head_dim")),
        (MultiHeadAttention(8, kernel_init=init), P("x", "y", "z")),
    ):
        params = jax.eval_shape(layer.init, KEY, X)["params"]
        kernel = params["query"]["kernel"]
        assert isinstance(kernel, jax.ShapeDtypeStruct) == (names is None)
        if names is not None:
            assert nn.get_partition_spec(params)["query"]["kernel"] == names
        # Boxed or not, parameters are arguments.
        assert jax.eval_shape(layer.apply, {"params": params}, X).shape == X.shape


def test_axis_names_survive_traces_cached_without_them() -> None:
    init = jax.jit(MultiHeadAttention(8).init)
    jax.eval_shape(init, KEY, X)
    with on("Auto"):
        shardings = sharding.of(init, KEY, X)
        kernel = jax.eval_shape(init, KEY, X)["params"]["query"]["kernel"]
    assert shardings["params"]["query"]["kernel"].spec == P(None, "model", None)
    assert isinstance(kernel, jax.ShapeDtypeStruct)


@pytest.mark.parametrize("kind", KINDS)
def test_constrain_shards_by_the_rules(kind: str) -> None:
    """An axis without a rule keeps its sharding; the rule (name, None) replicates it."""
    names = "batch", "length", "mlp"
    assert sharding.constrain(X, names) is X
    mlp = ("mlp", "model")
    for rules, batch in (
        (sharding.RULES, "data"),
        ((mlp,), "data"),
        ((mlp, ("batch", None)), None),
    ):
        with on(kind, rules):
            x = jax.device_put(X, P("data"))
            y = jax.jit(lambda x: sharding.constrain(x, names))(x)
        assert y.sharding.spec == P(batch, None, "model")

    def local(x: jax.Array) -> jax.Array:
        assert sharding.constrain(x, names) is x
        return x

    with on(kind, ()):
        assert sharding.constrain(X, names) is X  # There are no rules.
    with on(kind):
        x = jax.device_put(X, P("data"))
        jax.eval_shape(jax.shard_map(local, in_specs=P("data"), out_specs=P("data")), x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rules_for_heads_only_keep_rows_sharded(optimized: None, kind: str) -> None:
    """Like the rules of Flax's examples, which lack flax_mha's other names."""
    layer = MultiHeadAttention(8, num_kv_heads=4)
    with on(kind, (("activation_batch", "data"), ("heads", "model"))) as mesh:
        variables = described(layer, X)
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        compiled = jax.jit(layer.apply).lower(variables, x).compile()
    assert specs(variables["params"])["value/kernel"] == P(None, "model", None)
    assert collectives(compiled.as_text()) == [("all-reduce", 4 * X.size // 2)]
    assert compiled.output_shardings.spec[0] == "data"
