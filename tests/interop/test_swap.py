"""Models of Flax's layers, swapped for ours: nothing else changes."""

import functools
import pickle
import warnings
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
from tests.support.arrays import random_variables
from tests.support.decoding import decoded
from tests.support.oracle import error

pytestmark = pytest.mark.filterwarnings("ignore:(SelfAttention|The inputs_kv):DeprecationWarning")
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
    return random_variables(Model(1), X)


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


# Calls of a model by `apply`, methods and `bind`.
WAYS = {
    "call": lambda model, v: model.apply(v, X, CAUSAL),
    "method": lambda model, v: model.apply(v, X, CAUSAL, method="encode"),
    "function of the class": lambda model, v: model.apply(v, X, method=Model.encode),
    "function": lambda model, v: model.apply(v, X, method=lambda m, x: m.encode(x)),
    "bound": lambda model, v: model.bind(v).encode(X),
}


def results(way: Any, model: nn.Module) -> list[np.ndarray]:
    """Return the output, and all gradients as one vector."""

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(variables: Any) -> Any:
        out = way(model, variables)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = run(made())
    return [np.asarray(out), np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradients)])]


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("way", WAYS)
def test_swapped_model_has_equal_outputs_and_gradients(way: str, calls: list[Any]) -> None:
    want = results(WAYS[way], Model(1))
    assert not calls
    out, gradients = map(error, results(WAYS[way], interop.swap(Model(1))), want)
    assert out < 2e-6
    assert gradients < 1e-5
    assert len(calls) == 4


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize(
    "swapped", [lambda m: Outer(interop.swap(m)), lambda m: interop.swap(Outer(m))],
    ids=["the child", "the parent"],
)  # fmt: skip
def test_swap_reaches_nested_models(swapped: Any, calls: list[Any]) -> None:
    plain = Outer(Model(1))
    variables = random_variables(plain, X)
    ours = jax.jit(swapped(Model(1)).apply)
    assert error(ours(variables, X), np.asarray(jax.jit(plain.apply)(variables, X))) < 2e-6
    assert len(calls) == 4


@pytest.mark.sampled(0.08)
def test_swapped_model_decodes_like_full_forward() -> None:
    class Decoder(nn.Module):
        decode: bool = False

        @nn.compact
        def __call__(self, x: Any, kv: None = None) -> Any:  # `decoded` gives it.
            mask = None if self.decode else CAUSAL
            return x + nn.MultiHeadDotProductAttention(4, decode=self.decode)(x, mask=mask)

    variables = jax.jit(Decoder().init)(KEY, X)
    found = decoded(interop.swap(Decoder(decode=True)), variables, X)
    assert error(found, np.asarray(jax.jit(Decoder().apply)(variables, X))) < 2e-6


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.MultiHeadAttention
        self.layers = nnx.List([make(4, D, num_kv_heads=2, rngs=rngs) for _ in range(2)])
        self.last = make(2, D, normalize_qk=True, dropout_rate=0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x, decode=False)
        return self.last(x, deterministic=True, decode=False)


@pytest.mark.sampled(0.08)
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


class Cross(nn.Module):
    """A model of one layer of cross-attention."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.MultiHeadDotProductAttention(2, name="layer")(x, x[:, ::-2])


def test_every_output_is_captured_once() -> None:
    variables = jax.eval_shape(Cross().init, KEY, X)

    def captured(model: nn.Module) -> Any:
        call = functools.partial(model.apply, capture_intermediates=lambda *_: True)
        return jax.eval_shape(call, variables, X)

    assert captured(interop.swap(Cross())) == captured(Cross())


def test_swaps_of_equal_models_are_equal() -> None:
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def init(model: nn.Module) -> Any:
        traced.append(model)
        return model.init(KEY, X)

    swap = functools.partial(interop.swap, kernel="reference")
    for model in (swap(Cross()), swap(Cross()), swap(Cross()).clone()):
        jax.eval_shape(init, model)
    assert len(traced) == 1
    others = [Cross(), interop.swap(Cross()), swap(Model(1)), swap(Cross(), scale=1.0)]
    assert all(swap(Cross()) != other for other in others)
    # Fields that have no hash: a model equals itself.
    masked = interop.swap(Cross(), mask=np.ones((9, 5), bool))
    assert masked == masked.clone()


def test_further_fields_reach_each_layer_and_pickle(calls: list[Any]) -> None:
    ours = interop.swap(Model(1), kernel="reference")
    loaded = pickle.loads(pickle.dumps(ours))
    assert loaded == ours
    jax.eval_shape(loaded.init, KEY, X)
    assert [settings.kernel for _, settings, *_ in calls] == ["reference"] * 4


Jitted = nn.jit(Doubled)


class UsesJitted(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Jitted(2)(x)


def test_programs_of_nn_jit_are_kept_apart(calls: list[Any]) -> None:
    variables = jax.eval_shape(UsesJitted().init, KEY, X)
    numbers = []
    for model in (UsesJitted(), interop.swap(UsesJitted()), UsesJitted()):
        jax.eval_shape(model.apply, variables, X)
        numbers.append(len(calls))
    assert numbers == [0, 1, 1]


class WithOwnCode(nn.MultiHeadDotProductAttention):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(D)(x)


class WithOwnCodeNnx(nnx.MultiHeadAttention):
    def __call__(self, x: Any, **_: Any) -> Any:
        weights = nnx.dot_product_attention(*3 * [self.query(x)])
        return weights.reshape(x.shape)


class UsesOwnCodeNnx(nnx.Module):
    def __init__(self) -> None:
        self.part = nnx.List([WithOwnCodeNnx(2, D, rngs=nnx.Rngs(0))])

    def __call__(self, x: Any) -> Any:
        return self.part[0](x)


@pytest.mark.parametrize(
    ("layer", "left"),
    [
        (WithOwnCode(2), ["a subclass of Flax's layer in WithOwnCode at 'inner'"]),
        (Doubled(2), []),
        (UsesOwnCodeNnx(), ["a subclass of Flax's layer in WithOwnCodeNnx at 'part/0'"]),
    ],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_warning_names_attention_that_stays(layer: Any, left: list[str]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if isinstance(layer, nnx.Module):
            interop.swap(layer)
        else:
            ours = interop.swap(Outer(layer))
            jax.eval_shape(ours.apply, jax.eval_shape(ours.init, KEY, X), X)
    names = [str(w.message).partition(";")[0] for w in told]
    assert {*names} == {f"swap leaves {name}" for name in left}
    assert all(w.filename == __file__ for w in told)


class Mixed(nnx.Module):
    """An nnx model with a linen model in it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)
        self.linen = nnx.bridge.ToNNX(nn.SelfAttention(2), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linen(self.layer(x))


@pytest.mark.sampled(0.08)
def test_linen_in_nnx_is_swapped(calls: list[Any]) -> None:
    plain = nnx.bridge.lazy_init(Mixed(nnx.Rngs(0)), X)
    ours = interop.swap(plain)
    run = nnx.jit(lambda model: model(X))
    expected = np.asarray(run(plain))
    assert not calls
    assert error(run(ours), expected) < 2e-6
    assert len(calls) == 2
    assert nnx.graphdef(ours) == nnx.graphdef(interop.swap(plain))


def test_nnx_in_linen_is_swapped(calls: list[Any]) -> None:
    arguments = {"args": (2, D), "kwargs": {"decode": False}}
    plain = Outer(nnx.bridge.ToLinen(nnx.MultiHeadAttention, **arguments))
    variables = random_variables(plain, X)
    expected = np.asarray(jax.jit(plain.apply)(variables, X))
    assert not calls
    ours = interop.swap(plain)
    assert error(jax.jit(ours.apply)(variables, X), expected) < 2e-6
    assert len(calls) == 1
    trees = [jax.tree.structure(jax.eval_shape(m.init, KEY, X)) for m in (plain, ours)]
    assert trees[0] == trees[1]


def product(*args: Any, **kwargs: Any) -> Any:
    return jax.lax.dot_general(*args, **kwargs)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: interop.swap(3), "a module of linen or nnx, got 3"),
        (lambda: interop.swap(Model), "a module of linen or nnx, got <class"),
        (lambda: interop.swap(nn.MultiHeadDotProductAttention(2, qkv_dot_general=product))
         .init(KEY, X), "takes only qkv_dot_general=None"),
        (lambda: interop.swap(nnx.MultiHeadAttention(2, D, out_dot_general=product,
                                                     rngs=nnx.Rngs(0))), "out_dot_general=None,"),
        (lambda: interop.swap(nn.MultiHeadDotProductAttention(2)).init(KEY, X, inputs_kv=X),
         "inputs_kv"),
    ],
)  # fmt: skip
def test_unsupported_models_raise(wrong: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        wrong()


def test_layers_of_this_package_stay_as_they_are() -> None:
    """The config of our nnx layers is a linen module, and no part of the model."""
    model = flax_mha.nnx.MultiHeadAttention(4, D, rngs=nnx.Rngs(0))
    swapped = interop.swap(model)
    assert type(swapped.config) is type(model.config)
    assert swapped.query.kernel is model.query.kernel
