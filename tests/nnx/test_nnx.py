"""The nnx layer: Flax's parameters and numbers, the linen layer's features, nnx's transforms."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import flax_mha
from flax_mha import QKNorm, masks, scores, sharding
from flax_mha.nnx import MultiHeadAttention
from flax_mha.positions import Rotary

B, T, D = 2, 6, 16
RNG = np.random.default_rng(0)
X = jax.device_put(RNG.normal(size=(B, T, D)).astype(np.float32))
Y = jax.device_put(RNG.normal(size=(B, T + 2, 12)).astype(np.float32))
CLOSE = 2e-6


def pure(layer: Any, *kinds: Any) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(layer, *kinds))


def close(got: Any, wanted: Any, atol: float = CLOSE) -> None:
    np.testing.assert_allclose(got, wanted, atol=atol, rtol=0)


FLAX: dict[str, dict[str, Any]] = {
    "plain": {},
    "sizes": {"qkv_features": 32, "out_features": 5},
    "norms": {"normalize_qk": True},
    "groups": {"num_kv_heads": 2},
    "cross": {"in_kv_features": 12},
    "no bias": {"use_bias": False},
    "dtypes": {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16},
}


@pytest.mark.sampled(0.09)
@pytest.mark.parametrize("name", FLAX)
def test_replacing_flax_layer_keeps_parameters_and_numbers(name: str) -> None:
    """Parameters are bitwise equal, cast from float32. Outputs and gradients match Flax's."""
    fields = FLAX[name]
    kinds = (nnx.MultiHeadAttention, MultiHeadAttention)
    theirs, ours = (kind(4, D, rngs=nnx.Rngs(3), **fields) for kind in kinds)
    sizes = ("num_heads", "num_kv_heads", "head_dim", "qkv_features", "in_features", "out_features")
    for size in sizes:
        assert getattr(ours, size) == getattr(theirs, size)
    assert jax.tree.structure(pure(theirs, nnx.Param)) == jax.tree.structure(pure(ours, nnx.Param))
    drawn = kinds[0](4, D, rngs=nnx.Rngs(3), **fields | {"param_dtype": jnp.float32})
    params = jax.tree.map(
        lambda x, y: x.astype(y.dtype), *(pure(x, nnx.Param) for x in (drawn, ours))
    )
    jax.tree.map(np.testing.assert_array_equal, pure(ours, nnx.Param), params)
    nnx.update(theirs, params)
    x, *kv = (X, Y) if name == "cross" else (X,)

    def loss(layer: Any) -> jax.Array:
        return jnp.sum(layer(x, *kv, decode=False).astype(jnp.float32) ** 2)

    bound = 0.03 if name == "dtypes" else 2e-5
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected, wanted = nnx.jit(nnx.value_and_grad(loss))(theirs)
    actual, got = nnx.jit(nnx.value_and_grad(loss))(ours)
    np.testing.assert_allclose(actual, expected, rtol=bound)
    largest = max(np.abs(np.float32(x)).max() for x in jax.tree.leaves(nnx.to_pure_dict(wanted)))
    jax.tree.map(
        lambda a, b: close(np.float32(a) / largest, np.float32(b) / largest, bound),
        nnx.to_pure_dict(got), nnx.to_pure_dict(wanted),
    )  # fmt: skip


BEYOND: dict[str, dict[str, Any]] = {
    "rotary, groups, dv": {"rotary": Rotary(), "num_kv_heads": 2, "v_head_dim": 3, "head_dim": 8},
    "mask, scores, sinks": {
        "mask": masks.Causal(), "scores": (scores.SoftCap(5.0), scores.Alibi()), "sinks": True,
    },
    "norms, no output projection": {"normalize_qk": True, "project_out": False},
    "exclusive": {"mask": masks.Causal(), "exclusive": True},
    "norm and gate": {"qk_norm": QKNorm(), "gate": "feature"},
    "norm over heads": {
        "qk_norm": QKNorm("layernorm", over_heads=True, after_rotary=True), "rotary": Rotary(),
    },
    "key padding": {"mask": masks.Keys(jnp.arange(T) < 4)},
    "a kernel": {"kernel": "blockwise", "use_bias": ("query", "value")},
    "a learned scale": {"scale": "learned", "use_bias": ("out",)},
}  # fmt: skip


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("name", BEYOND)
def test_nnx_layer_equals_linen_layer(name: str) -> None:
    """Parameters move between the two unchanged, and outputs are bitwise equal."""
    fields = BEYOND[name]
    ours = MultiHeadAttention(4, D, rngs=nnx.Rngs(0), **fields)
    linen = flax_mha.MultiHeadAttention(4, **fields)
    shapes = jax.eval_shape(linen.init, jax.random.key(0), X)["params"]
    assert jax.tree.map(jnp.shape, pure(ours, nnx.Param)) == jax.tree.map(jnp.shape, shapes)
    values = jax.tree.map(lambda x: jax.random.normal(jax.random.key(5), x.shape), shapes)
    nnx.update(ours, nnx.State(values))
    jax.tree.map(np.testing.assert_array_equal, pure(ours, nnx.Param), dict(values))
    call = {"lengths": jnp.array([6, 3]), "head_mask": jnp.array([1.0, 0.0, 2.0, 1.0])}
    expected = jax.jit(lambda v: linen.apply({"params": v}, X, **call))(values)
    np.testing.assert_array_equal(nnx.jit(lambda m: m(X, **call))(ours), expected)


def test_sinks_and_scale_draw_no_random_keys() -> None:
    """Layers created afterwards start as they would without sinks and a learned scale."""
    counts = []
    for more in ({}, {"sinks": True, "scale": "learned"}):
        rngs = nnx.Rngs(0)
        MultiHeadAttention(4, D, rngs=rngs, **more)
        counts.append(int(rngs.params.count[...]))
    assert counts[0] == counts[1]


@pytest.mark.sampled(0.08)
def test_decoding_matches_causal_forward() -> None:
    layer = MultiHeadAttention(4, D, rotary=Rotary(), num_kv_heads=2, decode=True, rngs=nnx.Rngs(0))
    whole = nnx.jit(lambda layer: layer(X, decode=False, is_causal=True))(layer)
    layer.init_cache((B, T, D))
    step = nnx.jit(lambda layer, x: layer(x))
    steps = [step(layer, x) for x in np.split(np.asarray(X), [3, 4], axis=1)]
    close(np.concatenate(steps, axis=1), whole)
    np.testing.assert_array_equal(layer.cache_index, [T, T])
    assert layer.cached_key.shape == (B, T, 2, 4)
    assert np.isnan(step(layer, X[:, :1])).all()  # Beyond its capacity.
    layer.init_cache((B, T, D))
    close(step(layer, X), whole)


def test_train_and_eval_switch_dropout() -> None:
    layer = MultiHeadAttention(4, D, dropout_rate=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"deterministic=None; give it.*train\(\) or eval"):
        layer(X)
    call = nnx.jit(lambda layer, **call: layer(X, **call))
    layer.eval()
    np.testing.assert_array_equal(call(layer), call(layer))
    layer.train()
    one, other = call(layer), call(layer)
    assert np.abs(one - other).max() > 0.01
    # The same key, the same bits.
    np.testing.assert_array_equal(*(call(layer, rngs=nnx.Rngs(dropout=7)) for _ in range(2)))
    plain = MultiHeadAttention(4, D, dropout_rate=0.5, keep_rngs=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dropout needs rngs; give it"):
        plain(X, deterministic=False)


def by_attribute(model: Any, name: str, value: Any) -> None:
    setattr(model.layers[0], name, value)


SETTERS: dict[str, Any] = {
    "attribute": by_attribute,
    "with_attributes": lambda model, name, value: nnx.with_attributes(model, **{name: value}),
    "view": lambda model, name, value: nnx.view(model, **{name: value}),
}
VALUES = {"deterministic": True, "decode": True, "dropout_rate": 0.9, "rngs": nnx.Rngs(5)}
# `nnx.view` sets no others.
UNSET = {
    ("view", "dropout_rate"),
    ("view", "rngs"),
}


@pytest.mark.parametrize(
    ("way", "name"), [(w, n) for w in SETTERS for n in VALUES if (w, n) not in UNSET]
)
def test_attributes_are_set_as_in_flax_layer(way: str, name: str) -> None:
    """Equal layers have equal definitions, whenever their attributes were set."""
    fields, value = {"deterministic": False, "dropout_rate": 0.5, "decode": False}, VALUES[name]
    for kind in (nnx.MultiHeadAttention, MultiHeadAttention):
        model = nnx.Sequential(kind(4, D, rngs=nnx.Rngs(0), **fields))
        before = nnx.graphdef(model)
        changed = SETTERS[way](model, name, value)
        assert changed is None or nnx.graphdef(model) == before
        layer = (changed or model).layers[0]
        assert getattr(layer, name) is value
    if name != "rngs":
        fields |= {name: value}
        assert nnx.graphdef(layer) == nnx.graphdef(
            MultiHeadAttention(4, D, rngs=nnx.Rngs(0), **fields)
        )


def test_a_call_reads_attributes_that_were_set() -> None:
    fields = {"deterministic": False, "dropout_rate": 0.5}
    layer, other = (MultiHeadAttention(4, D, rngs=nnx.Rngs(0), **fields) for _ in range(2))
    call = nnx.jit(lambda layer, **call: layer(X, **call))
    layer.rngs = nnx.Rngs(5)
    expected = call(other, rngs=nnx.Rngs(5))
    np.testing.assert_array_equal(call(layer), expected)
    layer.rngs, layer.dropout_rate = nnx.Rngs(5), 0.9
    assert (call(layer) != expected).any()
    layer.deterministic = True
    other.deterministic = True
    np.testing.assert_array_equal(call(layer), call(other))
    layer.decode = True
    layer.init_cache((B, T, D))
    call(layer)
    np.testing.assert_array_equal(layer.cache_index, [T, T])


class Tower(nnx.Module):
    """A user's model with layers under vmap and scan."""

    def __init__(self, depth: int, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,))
        def make(rngs: nnx.Rngs) -> MultiHeadAttention:
            return MultiHeadAttention(4, D, mask=masks.Causal(), rotary=Rotary(), rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def step(x: jax.Array, layer: MultiHeadAttention) -> jax.Array:
            return x + layer(x)

        return step(x, self.layers)


@pytest.mark.slow
def test_layers_work_under_vmap_scan_remat_and_grad() -> None:
    tower = Tower(3, nnx.Rngs(0))
    out, grads = nnx.jit(nnx.value_and_grad(lambda tower, x: (tower(x) ** 2).sum()))(tower, X)
    stacked = pure(tower.layers, nnx.Param)
    x, call = X, nnx.jit(lambda layer, x: layer(x))
    for n in range(3):
        layer = MultiHeadAttention(4, D, mask=masks.Causal(), rotary=Rotary(), rngs=nnx.Rngs(0))
        nnx.update(layer, nnx.State(jax.tree.map(lambda leaf, n=n: leaf[n], stacked)))
        x = x + call(layer, x)
    np.testing.assert_allclose(out, (x**2).sum(), rtol=1e-5)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(nnx.to_pure_dict(grads)))


BY_METADATA: dict[str, Any] = {
    "kernel_metadata": {"out_sharding": (None, "model", None)},
    "out_kernel_metadata": {"out_sharding": ("model", None, None)},
    "bias_metadata": {"out_sharding": ("model", None)},
    "out_bias_metadata": {"out_sharding": (None,)},
}
# Flax's minigpt gives one initializer to all kernels of a layer.
BY_INITIALIZER: dict[str, Any] = {
    "kernel_init": nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model")),
    "bias_init": nnx.with_partitioning(nnx.initializers.zeros_init(), ("model",)),
}


@pytest.mark.sampled(0.042)
@pytest.mark.parametrize(
    ("kind", "rules", "fields"),
    [
        (AxisType.Auto, sharding.RULES, BY_METADATA),
        (AxisType.Explicit, sharding.RULES, BY_METADATA),
        (AxisType.Auto, (), BY_INITIALIZER),
    ],
    ids=["auto", "explicit", "no rules"],
)
def test_sharded_nnx_layer_matches_one_device(kind: Any, rules: Any, fields: Any) -> None:
    """Heads are sharded by nnx's metadata over one axis, rows over the other."""

    def run(layer: Any, x: jax.Array) -> Any:
        def loss(layer: Any) -> Any:
            out = layer(x)
            return (out**2).sum(), out

        return nnx.grad(loss, has_aux=True)(layer)

    def make(**fields: Any) -> Any:
        return MultiHeadAttention(4, D, mask=masks.Causal(), rngs=nnx.Rngs(0), **fields)

    wanted, expected = nnx.jit(run)(make(), X)
    mesh = jax.make_mesh((2, 4), ("data", "model"), (kind, kind))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        layer = make(**fields)
        assert "model" in layer.query.kernel.get_value().sharding.spec
        # A new function, because JAX's cache ignores axis rules.
        grads, out = nnx.jit(lambda *args: run(*args))(layer, jax.device_put(X, jax.P("data")))
    close(jax.device_get(out), expected, 5e-6)
    found, wanted = (nnx.to_pure_dict(tree) for tree in (grads, wanted))
    jax.tree.map(lambda a, b: close(jax.device_get(a), b, 2e-4), found, wanted)


MISTAKES = {
    "no cache": (
        lambda: MultiHeadAttention(4, D, decode=True, rngs=nnx.Rngs(0))(X), "call init_cache",
    ),
    "dtype": (lambda: MultiHeadAttention(4, D, dtype="foo", rngs=nnx.Rngs(0)), "not understood"),
    "capture": (lambda: MultiHeadAttention(4, D, capture="lse", rngs=nnx.Rngs(0)), "Capture"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_clear_errors(name: str) -> None:
    call, words = MISTAKES[name]
    with pytest.raises((ValueError, TypeError), match=words):
        call()
