"""Flax's tools see and change the calls of a layer's submodules."""

import contextlib
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

import flax_mha
import flax_mha.nnx
from flax_mha import QKNorm, variants
from flax_mha.layer.linear import Projection
from flax_mha.positions import Rotary
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


def captured(layer: nn.Module, *inputs: Any) -> Any:
    apply = functools.partial(layer.apply, capture_intermediates=True)
    with jax.default_matmul_precision("highest"):
        return jax.jit(apply)(*inputs)[1]["intermediates"]


@pytest.mark.parametrize("inputs", [(X,), (X, Y, X)], ids=["self", "three"])
def test_capture_intermediates_matches_flax(inputs: tuple[jax.Array, ...]) -> None:
    actual, expected = (captured(layer, PARAMS, *inputs) for layer in (OURS, THEIRS))
    assert {path[0] for path in flatten_dict(expected)} == {*SUBMODULES, "__call__"}
    chex.assert_trees_all_close(actual, expected, atol=1e-5)


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("change", CHANGES)
def test_intercepted_calls_take_effect_as_in_flax(change: str) -> None:
    names = ("query_ln", "value") if change == "not called" else ("query", "key_ln", "out")

    def loss(params: Any, x: jax.Array, layer: nn.Module, name: str) -> jax.Array:
        with changing(name, CHANGES[change]):
            return jnp.sum(jnp.sin(layer.apply(params, x)))

    def run(layer: nn.Module) -> Any:
        pull = jax.value_and_grad(loss, (0, 1))
        return jax.jit(lambda: [pull(PARAMS, X, layer, name) for name in names])()

    chex.assert_trees_all_close(run(OURS), run(THEIRS), atol=2e-5, rtol=1e-4)


MODELS = {
    "layer": OURS,
    "gated": flax_mha.MultiHeadAttention(N, gate="feature", sinks=True, qk_norm=QKNorm()),
    "latent": variants.MultiHeadLatentAttention(
        N, head_dim=4, kv_rank=4, rope_dim=2, q_rank=4, rotary=Rotary()
    ),
    "differential": variants.DifferentialAttention(2),
    "forgetting": variants.ForgettingAttention(N),
    "talking": variants.TalkingHeadsAttention(N),
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
    """In linen and nnx."""
    width = {"console_kwargs": {"width": 200}}
    tables = (
        OURS.tabulate(jax.random.key(0), X, **width),
        nnx.tabulate(nnx_layer(normalize_qk=True), X, **width),
    )
    assert all(f" {name} " in table for table in tables for name in SUBMODULES)


def nnx_layer(**fields: Any) -> flax_mha.nnx.MultiHeadAttention:
    layer = flax_mha.nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(0), **fields)
    nnx.update(layer, random_like(nnx.state(layer, nnx.Param)))
    return layer


class Scaled(nnx.Module):
    """A user's module with its own parameter."""

    def __init__(self, inner: nnx.Module) -> None:
        self.inner, self.factor = inner, nnx.Param(jnp.float32(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.factor * self.inner(x)


@pytest.mark.parametrize("normed", [False, True])
def test_nnx_layer_calls_replaced_submodules(normed: bool) -> None:
    """A user's modules are called, with their own parameters and gradients."""
    # A norm after the query projection would undo the factor.
    names = SUBMODULES - {"query", "key"} if normed else SUBMODULES - {"query_ln", "key_ln"}
    layer = nnx_layer(normalize_qk=normed)
    linen = {"params": nnx.to_pure_dict(nnx.state(layer))}

    def scaled() -> jax.Array:
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(changing(name, lambda call, x: 3 * call(x)))
            return OURS.copy(normalize_qk=normed).apply(linen, X)

    for name in names:
        setattr(layer, name, Scaled(getattr(layer, name)))

    def loss(layer: Any) -> Any:
        out = layer(X)
        return jnp.sum(jnp.sin(out)), out

    grads, out = nnx.jit(nnx.grad(loss, has_aux=True))(layer)
    np.testing.assert_allclose(out, jax.jit(scaled)(), atol=1e-5, rtol=1e-4)
    for name in names:
        assert jnp.abs(getattr(grads, name)["factor"].get_value()) > 1e-4, name


def doubled(subscripts, /, x, kernel, **options):
    """Compute twice a projection. Its code takes the place of that of `jnp.einsum`."""
    import jax.numpy as jnp

    contracted = 1 if subscripts.startswith("...t") and "nv" not in subscripts else 2
    return 2 * jnp.tensordot(x, kernel, contracted)


def test_projections_call_an_einsum_that_a_library_has_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As qwix does for LoRA: before, meanwhile and afterwards, outside jit and within."""
    projection, x = Projection((2, 4), ("embed", "heads", "head_dim")), np.ones((2, 5, 8), "f")
    given = jax.jit(projection.init)(jax.random.key(0), x)

    def calls() -> list[jax.Array]:
        """Return the projection outside jit, and by a new program."""
        apply = functools.partial(projection.apply, given)
        return [apply(x), jax.jit(lambda x: apply(x))(x)]

    plain = calls()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "qwix", ModuleType("qwix"))
        patch.setattr(jnp.einsum, "__code__", doubled.__code__)
        for found, wanted in zip(calls(), plain, strict=True):
            np.testing.assert_allclose(found, 2 * wanted, rtol=1e-6)
    for found, wanted in zip(calls(), plain, strict=True):
        np.testing.assert_array_equal(found, wanted)
