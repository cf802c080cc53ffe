"""Attention layers of other libraries: the same numbers, and arrays that come back to the bit."""

import math
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, interop, masks, positions
from tests.oracle import error, random_like

D, N = 16, 4
RNG = np.random.default_rng(0)
X, Y, K, V = (
    RNG.normal(size=(2, *shape)).astype(np.float32) for shape in ((5, D), (7, D), (7, 12), (7, 20))
)
CAUSAL = np.tri(5, dtype=bool)


class Theirs(NamedTuple):
    """A layer of another library: its arrays, itself with such arrays, and what it is given."""

    arrays: dict[str, Any]
    run: Callable[..., Any]
    given: tuple[np.ndarray, ...] = (X, X, X)
    prefix: str = ""


def random(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of those shapes, biases too."""
    return {
        name: 0.3 * np.random.default_rng(i).normal(size=x.shape).astype(np.float32)
        for i, (name, x) in enumerate(arrays.items())
    }


def of_torch(make: Callable[[Any], Any], given: Any = (X, X, X), call: Any = None) -> Theirs:
    torch = pytest.importorskip("torch", reason="needs the extra families")
    module = make(torch).eval()

    def run(arrays: Any, *given: Any) -> np.ndarray:
        module.load_state_dict({name: torch.tensor(x) for name, x in arrays.items()})
        with torch.no_grad():
            own = [torch.tensor(x) for x in given]
            out = call(module, *own) if call else module(*own)
        return out.numpy()

    return Theirs(random(module.state_dict()), run, given)


def d2l(bias: bool) -> Theirs:
    """As "Dive into Deep Learning", section 11.5, defines it: the package asks for too much."""

    def make(torch: Any) -> Any:
        module = torch.nn.Module()
        for name, features in zip(("W_q", "W_k", "W_v", "W_o"), (D, 12, 20, 24), strict=True):
            setattr(module, name, torch.nn.Linear(features, 24, bias=bias))
        module.W_o = torch.nn.Linear(24, 24, bias=bias)
        return module

    def call(own: Any, queries: Any, keys: Any, values: Any) -> Any:
        q, k, v = (
            f(x).reshape(len(x), x.shape[1], N, -1).transpose(1, 2)
            for f, x in zip((own.W_q, own.W_k, own.W_v), (queries, keys, values), strict=True)
        )
        weights = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).softmax(-1)
        return own.W_o((weights @ v).transpose(1, 2).reshape(*queries.shape[:2], -1))

    return of_torch(make, (X, K, V), call)


def timm(**options: Any) -> Theirs:
    layers = pytest.importorskip("timm.layers", reason="needs timm")
    return of_torch(lambda torch: layers.Attention(
        D, N, norm_layer=torch.nn.LayerNorm, **options
    ), (X,))  # fmt: skip


def vit_pytorch() -> Theirs:
    vit = pytest.importorskip("vit_pytorch.vit", reason="needs vit-pytorch")
    return of_torch(lambda torch: vit.Attention(D, N, dim_head=6), (X,))


def whole_vit_pytorch() -> Theirs:
    vit = pytest.importorskip("vit_pytorch.vit", reason="needs vit-pytorch")
    sizes = {"image_size": 8, "patch_size": 4, "num_classes": 3, "dim": D, "mlp_dim": 8}
    return of_torch(lambda torch: vit.ViT(**sizes, depth=1, heads=N))


def x_transformers(given: tuple[np.ndarray, ...] = (X,), **options: Any) -> Theirs:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip(
            "x_transformers.x_transformers", reason="needs x-transformers"
        )

    def call(module: Any, x: Any, y: Any = None, z: Any = None) -> Any:
        out = module(x, context=y)
        return out[0] if isinstance(out, tuple) else out

    make = lambda torch: library.Attention(D, heads=N, **options)  # noqa: E731
    return of_torch(make, given, call)


def equinox(**options: Any) -> Theirs:
    eqx = pytest.importorskip("equinox", reason="needs equinox")
    sizes = {"key_size": 12, "value_size": 20, "output_size": 9} if options else {}
    layer = eqx.nn.MultiheadAttention(N, D, **sizes, **options, key=jax.random.key(0))
    arrays, static = eqx.partition(layer, eqx.is_array)
    leaves, tree = jax.tree_util.tree_flatten_with_path(arrays)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]

    def run(arrays: Any, *given: Any) -> Any:
        own = eqx.combine(jax.tree.unflatten(tree, [arrays[name] for name in names]), static)
        return jax.vmap(own)(*given)

    given = (X, K, V) if options else (X, X, X)
    return Theirs(random(dict(zip(names, (x for _, x in leaves), strict=True))), run, given)


def haiku(**options: Any) -> Theirs:
    hk = pytest.importorskip("haiku", reason="needs dm-haiku")

    def forward(*given: Any) -> Any:
        init = hk.initializers.VarianceScaling()
        return hk.MultiHeadAttention(N, 6, w_init=init, name="own", **options)(*given)

    model = hk.without_apply_rng(hk.transform(forward))
    with jax.numpy_rank_promotion("allow"):
        params = jax.eval_shape(model.init, jax.random.key(0), X, K, V)
    names = {f"{path}/{leaf}": x for path, own in params.items() for leaf, x in own.items()}

    def run(arrays: Any, *given: Any) -> Any:
        own = {path: {leaf: arrays[f"{path}/{leaf}"] for leaf in params[path]} for path in params}
        with jax.numpy_rank_promotion("allow"):
            return model.apply(own, *given)

    return Theirs(random(names), run, (X, K, V), "own/")


def keras(name: str = "MultiHeadAttention", **options: Any) -> Theirs:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    library = pytest.importorskip("keras", reason="needs keras")
    sizes = {"num_heads": N, "key_dim": 6} if name == "MultiHeadAttention" else {}
    layer = getattr(library.layers, name)(**sizes, **options, name="own")
    layer.build(X.shape, V.shape, K.shape)

    def run(arrays: Any, query: Any, key: Any, value: Any) -> Any:
        for w in layer.weights:
            w.assign(arrays[w.path])
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            # Without the weights Keras asks JAX for what has no value_dim.
            return np.asarray(layer(query, value, key, return_attention_scores=True)[0])

    return Theirs(random({w.path: w for w in layer.weights}), run, (X, K, V), "own/")


CASES: dict[str, tuple[str, Callable[[], Theirs]]] = {
    "d2l": ("d2l", lambda: d2l(False)),
    "d2l with biases": ("d2l", lambda: d2l(True)),
    "timm": ("timm", timm),
    "timm, sizes and biases": ("timm", lambda: timm(qkv_bias=True, attn_head_dim=6, dim_out=9)),
    "timm, no bias": ("timm", lambda: timm(proj_bias=False)),
    "vit-pytorch": ("vit-pytorch", vit_pytorch),
    "x-transformers": ("x-transformers", lambda: x_transformers(dim_head=6)),
    "x-transformers, sizes": ("x-transformers", lambda: x_transformers(
        (X, V, V), dim_head=6, value_dim_head=5, dim_context=20, dim_out=9
    )),
    "equinox": ("equinox", equinox),
    "equinox, sizes": ("equinox", lambda: equinox(
        qk_size=6, vo_size=5, use_query_bias=True, use_output_bias=True
    )),
    "haiku": ("haiku", haiku),
    "haiku, sizes": ("haiku", lambda: haiku(value_size=5, model_size=9, with_bias=False)),
    "keras": ("keras", keras),
    "keras, sizes": ("keras", lambda: keras(value_dim=5, output_shape=9, use_bias=False)),
    "keras, grouped": ("keras", lambda: keras(
        "GroupQueryAttention", head_dim=6, num_query_heads=N, num_key_value_heads=2
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_layer(name: str) -> None:
    library, make = CASES[name]
    theirs = make()
    want = np.asarray(theirs.run(theirs.arrays, *theirs.given))
    module, variables = interop.from_layer(theirs.arrays, N)
    assert error(jax.jit(module.apply)(variables, *theirs.given), want) < 2e-6
    back = interop.to_layer(module, variables, library, theirs.prefix)
    assert back.keys() == theirs.arrays.keys()
    for key, x in theirs.arrays.items():
        np.testing.assert_array_equal(back[key], x)
    # Theirs takes ours.
    np.testing.assert_array_equal(theirs.run(back, *theirs.given), want)


REFUSED_BY_NAME: dict[str, Callable[[], Theirs]] = {
    "to_k.weight must be": lambda: x_transformers(dim_head=6, kv_heads=2),
    "surplus mem_k": lambda: x_transformers(num_mem_kv=1),
    "surplus qk_norm_k_scale": lambda: x_transformers(qk_norm=True, qk_norm_dim_scale=True),
    "surplus k_norm.weight": lambda: timm(qk_norm=True),
    "surplus own/gate/bias": lambda: keras(use_gate=True),
    "surplus cls_token; surplus mlp_head.bias": whole_vit_pytorch,
}


@pytest.mark.parametrize("told", REFUSED_BY_NAME)
def test_what_ours_has_not(told: str) -> None:
    with pytest.raises(ValueError, match=told):
        interop.from_layer(REFUSED_BY_NAME[told]().arrays, N)


def test_haikus_params_as_they_are() -> None:
    theirs = haiku()
    nested: dict[str, dict[str, Any]] = {}
    for name, x in theirs.arrays.items():
        path, _, leaf = name.rpartition("/")
        nested.setdefault(path, {})[leaf] = x
    flat, found = (interop.from_layer(x, N)[1] for x in (theirs.arrays, nested))
    jax.tree.map(np.testing.assert_array_equal, found, flat)


def test_masks() -> None:
    """True is what may be seen, as there."""
    theirs = equinox()
    want = theirs.run(theirs.arrays, X, X, X, np.broadcast_to(CAUSAL, (2, 5, 5)))
    module, variables = interop.from_layer(theirs.arrays, N)
    assert error(module.apply(variables, X, mask=masks.Causal()), want) < 2e-6


@pytest.mark.parametrize("library", interop.LIBRARIES)
def test_gradients_and_the_way_back(library: str) -> None:
    """Without any library: arrays of ours, as theirs, as ours again."""
    biased = {"vit-pytorch": ("out",), "x-transformers": False}.get(library, True)
    module: Any = MultiHeadAttention(N, use_bias=biased)
    if library == "vit-pytorch":
        module = nn.Sequential([nn.LayerNorm(1e-5), module])
    variables = random_like(jax.eval_shape(module.init, jax.random.key(0), X))
    tensors = interop.to_layer(module, variables, library, "a.b/")
    again, found = interop.from_layer(tensors, N)
    jax.tree.map(np.testing.assert_array_equal, found, variables)

    def gradient(module: Any, variables: Any) -> Any:
        return jax.grad(lambda variables: (module.apply(variables, X) ** 2).sum())(variables)

    got, want = gradient(again, found), gradient(module, variables)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def made(library: str, **changed: Any) -> dict[str, Any]:
    """Arrays of a layer in a library, some of them changed; None is left out."""
    module = MultiHeadAttention(N, use_bias=library != "x-transformers")
    variables = random_like(jax.eval_shape(module.init, jax.random.key(0), X))
    tensors = interop.to_layer(module, variables, library) | changed
    return {name: x for name, x in tensors.items() if x is not None}


ONE = np.ones((1, D), np.float32)
MISTAKES: dict[str, tuple[dict[str, Any], int]] = {
    "missing W_k.weight": (made("d2l", **{"W_k.weight": None}), N),
    "missing W_k.bias": (made("d2l", **{"W_k.bias": None}), N),
    "missing W_o.weight": (made("d2l", **{"W_o.weight": None}), N),
    r"key_proj.weight must be \[16, 16\], is \[1, 16\]":
        (made("equinox", **{"key_proj.weight": ONE}), N),
    "surplus gate/kernel": (made("keras", **{"gate/kernel": ONE}), N),
    "surplus to_v_gate.weight": (made("x-transformers", **{"to_v_gate.weight": ONE}), N),
    "surplus to_q.bias": (made("x-transformers", **{"to_q.bias": ONE[0]}), N),
    "surplus q_norm.weight": (made("timm", **{"q_norm.weight": ONE}), N),
    "surplus more/linear/w": ({**made("haiku"), "more/linear/w": ONE}, N),
    r"query/kernel must be \[16, 8, 2\], is \[16, 4, 4\]": (made("keras"), 8),
    "got .*weight.*from_torch": ({"weight": ONE}, N),
    "kernels have two axes": (made("d2l", **{"W_q.weight": np.ones(3)}), N),
    "num_heads must be at least 1": (made("d2l"), 0),
    "must be .15, 16., is .16, 16.": (made("d2l"), 3),
}  # fmt: skip


@pytest.mark.parametrize("told", MISTAKES)
def test_mistakes(told: str) -> None:
    with pytest.raises(ValueError, match=told):
        interop.from_layer(*MISTAKES[told])


LAYER = MultiHeadAttention(N)
REFUSED: dict[str, tuple[Any, str]] = {
    "keras has no MultiHeadAttention with rotary":
        (MultiHeadAttention(N, rotary=positions.Rotary()), "keras"),
    "haiku has no MultiHeadAttention with gate": (MultiHeadAttention(N, gate="head"), "haiku"),
    "equinox has no layer of such sizes and biases: .*key_proj":
        (MultiHeadAttention(N, num_kv_heads=2), "equinox"),
    "timm has no layer of such sizes and biases: .*proj.weight must be":
        (MultiHeadAttention(N, v_head_dim=7), "timm"),
    "timm has no layer of such sizes and biases":
        (MultiHeadAttention(N, num_kv_heads=2), "timm"),
    "haiku has no layer of such sizes and biases: .*missing key/b":
        (MultiHeadAttention(N, use_bias=("query",)), "haiku"),
    "x-transformers has no layer of such sizes and biases: .*surplus to_q.bias":
        (LAYER, "x-transformers"),
    "library must be one of": (LAYER, "torch"),
}  # fmt: skip


@pytest.mark.parametrize("told", REFUSED)
def test_what_a_library_has_not(told: str) -> None:
    module, library = REFUSED[told]
    variables = random_like(jax.eval_shape(module.init, jax.random.key(0), X))
    with pytest.raises(ValueError, match=told):
        interop.to_layer(module, variables, library)


@pytest.mark.parametrize("library", ["vit-pytorch", "keras"])
@pytest.mark.parametrize("module", [3, nn.Dense(3), nn.Sequential([nn.LayerNorm(), LAYER])])
def test_what_is_no_layer(module: Any, library: str) -> None:
    told = f"nn.Sequential of nn.LayerNorm.1e-5. and one; got for {library}"
    with pytest.raises(TypeError, match=told):
        interop.to_layer(module, {}, library)
