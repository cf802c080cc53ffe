"""Models of Flax's layers, swapped for ours: nothing else changes."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import interop
from flax_mha.layer import core
from tests.support.oracle import error, random_like

# Flax deprecates SelfAttention.
pytestmark = pytest.mark.filterwarnings("ignore:SelfAttention:DeprecationWarning")
D = 16
X = np.random.default_rng(0).normal(size=(2, 9, D)).astype(np.float32)
CAUSAL = np.tril(np.ones((2, 1, 9, 9), np.float32))
KEY = jax.random.key(1, impl="unsafe_rbg")


class Doubled(nn.MultiHeadDotProductAttention):
    """A user's subclass of Flax's layer."""

    factor: float = 2.0

    @nn.compact
    def __call__(self, x: Any, **options: Any) -> Any:
        return self.factor * super().__call__(x, **options)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        layer = nn.MultiHeadDotProductAttention(4, normalize_qk=True)
        x = x + layer(nn.LayerNorm()(x), mask=mask)
        x = x + Doubled(2)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.SelfAttention(2)(nn.LayerNorm()(x), mask)
        return x + nn.MultiHeadAttention(2, qkv_features=8, use_bias=False)(x, X)


class Model(nn.Module):
    layers: int = 2

    def setup(self) -> None:
        self.blocks = [nn.remat(Block)() for _ in range(self.layers)]
        self.head = nn.Dense(3)

    def encode(self, x: Any, mask: Any = None) -> Any:
        for block in self.blocks:
            x = block(x, mask)
        return x

    def __call__(self, x: Any, mask: Any = None) -> Any:
        return self.head(self.encode(x, mask))


class Outer(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(self.inner(x))


@functools.cache
def made() -> Any:
    """Return the variables of a model with one block."""
    return random_like(jax.eval_shape(Model(1).init, KEY, X))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the calls of our layer."""
    seen: list[Any] = []
    attend = core.attend
    monkeypatch.setattr(core, "attend", lambda *a, **k: (seen.append(a), attend(*a, **k))[1])
    return seen


@pytest.mark.slow
def test_swapped_model_has_bitwise_equal_parameters() -> None:
    model = Model()
    ours = interop.swap(model)
    assert isinstance(ours, Model)
    assert ours.layers == 2
    jax.tree.map(np.testing.assert_array_equal, *(jax.jit(m.init)(KEY, X) for m in (model, ours)))


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize(
    "way",
    [
        lambda model, v: model.apply(v, X, CAUSAL),
        lambda model, v: model.apply(v, X, CAUSAL, method="encode"),
        lambda model, v: model.apply(v, X, method=Model.encode),
        lambda model, v: model.apply(v, X, method=lambda m, x: m.encode(x)),
        lambda model, v: model.bind(v).encode(X),
    ],
    ids=["call", "method", "function of the class", "function", "bound"],
)
def test_swapped_model_has_equal_outputs(way: Any, calls: list[Any]) -> None:
    model = Model(1)
    variables = made()
    want = jax.jit(lambda v: way(model, v))(variables)
    assert not calls
    ours = interop.swap(model)
    assert error(jax.jit(lambda v: way(ours, v))(variables), np.asarray(want)) < 2e-6
    assert len(calls) == 4


@pytest.mark.slow
def test_swapped_model_has_equal_gradients() -> None:
    model = Model(1)
    variables = made()

    def gradient(model: nn.Module) -> Any:
        loss = lambda v: jnp.sum(jnp.sin(model.apply(v, X, CAUSAL)))  # noqa: E731
        found = jax.jit(jax.grad(loss))(variables)
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(found)])

    assert error(gradient(interop.swap(model)), gradient(model)) < 1e-5


@pytest.mark.sampled(0.3, slow=0.5)
@pytest.mark.parametrize(
    "swapped", [lambda m: Outer(interop.swap(m)), lambda m: interop.swap(Outer(m))],
    ids=["the child", "the parent"],
)  # fmt: skip
def test_swap_reaches_nested_models(swapped: Any, calls: list[Any]) -> None:
    plain = Outer(Model(1))
    variables = random_like(jax.eval_shape(plain.init, KEY, X))
    ours = jax.jit(swapped(Model(1)).apply)
    assert error(ours(variables, X), np.asarray(jax.jit(plain.apply)(variables, X))) < 2e-6
    assert len(calls) == 4


def test_swap_passes_further_fields(calls: list[Any]) -> None:
    jax.eval_shape(interop.swap(Model(1), kernel="reference").init, KEY, X)
    assert [settings.kernel for _, settings, *_ in calls] == ["reference"] * 4


@pytest.mark.sampled(0.3, slow=0.5)
def test_swapped_model_decodes_like_full_forward() -> None:
    class Decoder(nn.Module):
        decode: bool = False

        @nn.compact
        def __call__(self, x: Any) -> Any:
            mask = None if self.decode else CAUSAL
            return x + nn.MultiHeadDotProductAttention(4, decode=self.decode)(x, mask=mask)

    variables = Decoder().init(KEY, X)
    ours = interop.swap(Decoder(decode=True))
    cache = ours.init(KEY, X)["cache"]
    step = jax.jit(lambda cache, x: ours.apply({**variables, "cache": cache}, x, mutable="cache"))
    outs = []
    for t in range(X.shape[1]):
        out, new = step(cache, X[:, t : t + 1])
        cache = new["cache"]
        outs.append(out)
    assert error(jnp.concatenate(outs, 1), np.asarray(Decoder().apply(variables, X))) < 2e-6


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.MultiHeadAttention
        self.layers = nnx.List([make(4, D, num_kv_heads=2, rngs=rngs) for _ in range(2)])
        self.last = make(2, D, normalize_qk=True, dropout_rate=0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x, decode=False)
        return self.last(x, deterministic=True, decode=False)


@pytest.mark.sampled(0.3, slow=0.5)
def test_swap_of_nnx_model_shares_parameters(calls: list[Any]) -> None:
    model = Nnx(nnx.Rngs(0))
    ours = interop.swap(model)
    assert type(model.last) is nnx.MultiHeadAttention
    assert type(ours.last) is flax_mha.nnx.MultiHeadAttention
    assert ours.last.query.kernel is model.last.query.kernel
    assert error(ours(X), np.asarray(model(X))) < 2e-6
    assert len(calls) == 3
    trees = [jax.tree.structure(nnx.to_pure_dict(nnx.state(m, nnx.Param))) for m in (model, ours)]
    assert trees[0] == trees[1]
    # Shared, so that an optimizer of either updates both.
    model.last.out.bias[...] += 1.0
    assert error(ours(X), np.asarray(model(X))) < 2e-6
    assert type(interop.swap(model.last)) is flax_mha.nnx.MultiHeadAttention


def product(*args: Any, **kwargs: Any) -> Any:
    return jax.lax.dot_general(*args, **kwargs)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: interop.swap(3), "a module of linen or nnx, got 3"),
        (lambda: interop.swap(Model), "a module of linen or nnx, got <class"),
        (lambda: interop.swap(nn.MultiHeadDotProductAttention(2, qkv_dot_general=product))
         .init(KEY, X), "a layer with qkv_dot_general"),
        (lambda: interop.swap(nnx.MultiHeadAttention(2, D, out_dot_general=product,
                                                     rngs=nnx.Rngs(0))), "with out_dot_general"),
        (lambda: interop.swap(nnx.MultiHeadAttention(2, D, qkv_promote_dtype=product,
                                                     rngs=nnx.Rngs(0))), "with qkv_promote_dtype"),
    ],
)  # fmt: skip
def test_unsupported_models_raise(wrong: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        wrong()
