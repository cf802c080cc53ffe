"""Flax's tools see and change the calls of a layer's submodules."""

import contextlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import chex
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

import flax_mha
import flax_mha.nnx
from flax_mha import QKNorm, interop, variants
from flax_mha.layer.linear import Projection
from flax_mha.positions import Rotary
from tests.support.meshes import B, collectives, described, on
from tests.support.oracle import random_like

D, N = 16, 4
RNG = np.random.default_rng(0)
X, Y = (jax.device_put(RNG.normal(size=(2, 5, D)).astype(np.float32)) for _ in range(2))
THEIRS = nn.MultiHeadDotProductAttention(N, normalize_qk=True)
OURS = flax_mha.MultiHeadDotProductAttention(N, normalize_qk=True)
PARAMS = random_like(jax.eval_shape(THEIRS.init, jax.random.key(0), X))
SUBMODULES = {"query", "key", "value", "out", "query_ln", "key_ln"}


def changing(name: str, change: Callable[[Any, Any], Any]) -> Any:
    """Replace each call of the submodules with this name by change(call, x)."""

    def interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.module.name != name or context.method_name != "__call__":
            return call(*args, **kwargs)
        return change(call, *args)

    return nn.intercept_methods(interceptor)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "zero": lambda call, x: jnp.zeros_like(call(x)),
    "double": lambda call, x: 2 * call(x),
    "input": lambda call, x: call(x + 1),
    "not called": lambda call, x: jnp.roll(x, 1, 0) if x.ndim == 4 else call(jnp.roll(x, 1, 0)),
}


@pytest.mark.parametrize("inputs", [(X,), (X, Y), (X, Y, X)], ids=["self", "cross", "three"])
def test_capture_intermediates_matches_flax(inputs: tuple[jax.Array, ...]) -> None:
    with jax.default_matmul_precision("highest"):
        actual, expected = (
            layer.apply(PARAMS, *inputs, capture_intermediates=True)[1]["intermediates"]
            for layer in (OURS, THEIRS)
        )
    assert {path[0] for path in flatten_dict(expected)} == {*SUBMODULES, "__call__"}
    chex.assert_trees_all_close(actual, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_intercepted_calls_take_effect_as_in_flax(change: str) -> None:
    def both(layer: nn.Module, name: str) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            with changing(name, CHANGES[change]):
                return jnp.sum(jnp.sin(layer.apply(params, x)))

        return jax.value_and_grad(loss, (0, 1))(PARAMS, X)

    for name in ("query_ln", "value") if change == "not called" else sorted(SUBMODULES):
        chex.assert_trees_all_close(both(OURS, name), both(THEIRS, name), atol=2e-5, rtol=1e-4)


MODELS = {
    "layer": OURS,
    "gated": flax_mha.MultiHeadAttention(N, gate="feature", sinks=True, qk_norm=QKNorm()),
    "latent": variants.MultiHeadLatentAttention(
        N, head_dim=4, kv_rank=4, rope_dim=2, q_rank=4, rotary=Rotary()
    ),
    "differential": variants.DifferentialAttention(2),
    "forgetting": variants.ForgettingAttention(N),
    "talking": variants.TalkingHeadsAttention(N),
    "blocks": flax_mha.Encoder(2, flax_mha.EncoderBlock(OURS, 8)),
    "experts": flax_mha.Encoder(
        1, flax_mha.EncoderBlock(OURS, mlp=flax_mha.Experts(2, 8, 1), parallel=True)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_interceptors_see_only_calls(name: str) -> None:
    """They see no helper methods, and no submodule that is never called."""
    seen: dict[str, set[str]] = {}

    def listen(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.setdefault(context.method_name, set()).add("/".join(context.module.path))
        return call(*args, **kwargs)

    with nn.intercept_methods(listen):
        variables = jax.eval_shape(MODELS[name].init, jax.random.key(0), X)
    assert {*seen} == {"__call__"}
    owners = {"/".join(path[:-1]) for path in flatten_dict(variables["params"])}
    assert owners - {""} <= seen["__call__"]


def test_tabulate_shows_each_projection() -> None:
    table = OURS.tabulate(jax.random.key(0), X, console_kwargs={"width": 200})
    for name in SUBMODULES:
        assert f" {name} " in table


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_intercepted_calls_send_no_more_over_mesh(optimized, kind: str) -> None:
    """A gradient sends as much, whether a value is observed, doubled or left alone.

    On CPUs that is 4·B·T·D: the output, and the gradients of queries, keys and values.
    """
    layer = flax_mha.MultiHeadAttention(8)
    x = jnp.ones((B, 16, 32))

    def observed(call: Any, x: jax.Array) -> jax.Array:
        return call(x)

    def text(listening: Any) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            with listening:
                return jnp.sum(jnp.sin(layer.apply(params, x)))

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile()
        return sorted(collectives(compiled.as_text()))

    _, leave = on(kind, shape=(1, 8))
    try:
        params = described(layer, x)
        plain = text(contextlib.nullcontext())
        assert sum(size for _, size in plain) == 4 * 4 * x.size
        assert text(changing("value", observed)) == plain
        assert text(changing("value", CHANGES["double"])) == plain
    finally:
        leave()


def nnx_layer(**fields: Any) -> flax_mha.nnx.MultiHeadAttention:
    layer = flax_mha.nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(0), **fields)
    nnx.update(layer, random_like(nnx.state(layer, nnx.Param)))
    return layer


@pytest.mark.parametrize("name", sorted(SUBMODULES))
def test_nnx_layer_calls_replaced_submodules(name: str) -> None:
    """A user's module is called, with its own parameters and gradients."""

    class Scaled(nnx.Module):
        def __init__(self, inner: nnx.Module) -> None:
            self.inner, self.factor = inner, nnx.Param(jnp.float32(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.factor * self.inner(x)

    # A norm after the query projection would undo the factor.
    normed = name.endswith("_ln")
    layer = nnx_layer(normalize_qk=normed)
    linen = {"params": nnx.to_pure_dict(nnx.state(layer))}
    with changing(name, lambda call, x: 3 * call(x)):
        expected = OURS.copy(normalize_qk=normed).apply(linen, X)
    setattr(layer, name, Scaled(getattr(layer, name)))
    np.testing.assert_allclose(layer(X), expected, atol=1e-5, rtol=1e-4)
    grads = nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(X))))(layer)
    assert jnp.abs(getattr(grads, name)["factor"].get_value()) > 1e-4


def test_nnx_tabulate_shows_each_projection() -> None:
    table = nnx.tabulate(nnx_layer(normalize_qk=True), X, console_kwargs={"width": 200})
    for name in SUBMODULES:
        assert f" {name} " in table


def test_swapped_layers_are_captured_once() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.MultiHeadDotProductAttention(N, name="attention")(x)

    variables = {"params": {"attention": random_like(
        jax.eval_shape(nn.MultiHeadDotProductAttention(N).init, jax.random.key(0), X)["params"]
    )}}  # fmt: skip
    with jax.default_matmul_precision("highest"):
        actual, expected = (
            model.apply(variables, X, capture_intermediates=True)[1]
            for model in (interop.swap(Model()), Model())
        )
    chex.assert_trees_all_close(actual, expected, atol=1e-5)


def doubled(subscripts, /, x, kernel, **options):
    """Compute twice a projection. Its code takes the place of that of `jnp.einsum`."""
    import jax.numpy as jnp

    contracted = 1 if subscripts.startswith("...t") and "nv" not in subscripts else 2
    return 2 * jnp.tensordot(x, kernel, contracted)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_projections_call_an_einsum_that_a_library_has_replaced(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As qwix does for LoRA: before, meanwhile and afterwards, outside jit and within."""
    key, x = jax.random.key(0), np.ones((2, 5, 8), np.float32)
    if kind == "linen":
        projection = Projection((2, 4), ("embed", "heads", "head_dim"))
        given = projection.init(key, x)
        call: Any = lambda x: projection.apply(given, x)  # noqa: E731
    else:
        call = flax_mha.nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0)).query
    plain = call(x)
    jitted = jax.jit(lambda x: call(x))(x)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "qwix", ModuleType("qwix"))
        patch.setattr(jnp.einsum, "__code__", doubled.__code__)
        np.testing.assert_allclose(call(x), 2 * plain, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(lambda x: call(x))(x), 2 * plain, rtol=1e-6)
    np.testing.assert_array_equal(call(x), plain)
    np.testing.assert_array_equal(jax.jit(lambda x: call(x))(x), jitted)


def test_projections_let_a_library_note_its_einsum() -> None:
    projection = Projection((4,), ("embed", "mlp")).bind({"params": {}})
    projection.kernel_lora_einsum_str = "ab,bc->ac"
    assert projection.kernel_lora_einsum_str == "ab,bc->ac"
    with pytest.raises(flax.errors.SetAttributeFrozenModuleError):
        projection.kernel = 1
