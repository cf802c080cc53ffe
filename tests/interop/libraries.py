"""Attention layers of other libraries, with random arrays, and their inputs."""

import math
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

D, N = 16, 4
RNG = np.random.default_rng(0)
X, K, V = (RNG.normal(size=(2, *shape)).astype(np.float32) for shape in ((5, D), (7, 12), (7, 20)))


class Theirs(NamedTuple):
    """A layer of another library: its arrays, a function that runs it with them, and its inputs."""

    arrays: dict[str, Any]
    run: Callable[..., Any]
    given: tuple[np.ndarray, ...] = (X, X, X)
    prefix: str = ""


def random(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return random arrays of these shapes, including biases."""
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


def d2l() -> Theirs:
    """Build the layer of "Dive into Deep Learning", section 11.5, without its package."""

    def make(torch: Any) -> Any:
        module = torch.nn.Module()
        for name, features in zip(("W_q", "W_k", "W_v", "W_o"), (D, 12, 20, 24), strict=True):
            setattr(module, name, torch.nn.Linear(features, 24))
        module.W_o = torch.nn.Linear(24, 24)
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


def vit_pytorch(heads: int = N, dim_head: int = 6) -> Theirs:
    vit = pytest.importorskip("vit_pytorch.vit", reason="needs vit-pytorch")
    return of_torch(lambda torch: vit.Attention(D, heads, dim_head=dim_head), (X,))


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
            # Without the weights, Keras calls a JAX function that supports no value_dim.
            return np.asarray(layer(query, value, key, return_attention_scores=True)[0])

    return Theirs(random({w.path: w for w in layer.weights}), run, (X, K, V), "own/")
