"""Attention layers of other libraries, with random arrays, and their inputs."""

import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_mha import positions, scores
from tests.support import oracle

D, N = 16, 4
RNG = np.random.default_rng(0)
X, K, V = (RNG.normal(size=(2, *shape)).astype(np.float32) for shape in ((5, D), (7, 12), (7, 20)))


class Theirs(NamedTuple):
    """A layer of another library: its arrays, a function that runs it with them, and its inputs.

    `fields` are what its arrays do not show.
    """

    arrays: dict[str, Any]
    run: Callable[..., Any]
    given: tuple[np.ndarray, ...] = (X, X, X)
    prefix: str = ""
    fields: Mapping[str, Any] = {}


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
    names = {"query": "W_q", "key": "W_k", "value": "W_v", "out": "W_o"}
    shapes = {}
    for name, features in zip(names.values(), (D, 12, 20, 24), strict=True):
        shapes |= {f"{name}.weight": np.empty((24, features)), f"{name}.bias": np.empty(24)}

    def run(arrays: Any, *given: Any) -> np.ndarray:
        p = {
            name: {
                "kernel": arrays[f"{own}.weight"].T.reshape(-1, N, 6),
                "bias": arrays[f"{own}.bias"].reshape(N, 6),
            }
            for name, own in names.items()
        }
        p["out"] = {"kernel": arrays["W_o.weight"].T.reshape(N, 6, 24), "bias": arrays["W_o.bias"]}
        return oracle.multi_head(p, *given)[0]

    return Theirs(random(shapes), run, (X, K, V))


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


def linen(layer: Any, *given: Any, call: Any = lambda out: out, **more: Any) -> Theirs:
    """Return a linen layer, of whose inputs X is the first."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        params = jax.eval_shape(layer.init, jax.random.key(0), X, *given)["params"]

    def run(arrays: Any, *inputs: Any) -> Any:
        params = unflatten_dict(arrays, sep="/")
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return call(layer.apply({"params": params}, *inputs, *given))

    return Theirs(random(flatten_dict(params, sep="/")), run, **more)


def gemma(kv_heads: int = N, **options: Any) -> Theirs:
    modules = pytest.importorskip("gemma.gm.nn._modules", reason="needs gemma")
    layer = modules.Attention(
        num_heads=N, num_kv_heads=kv_heads, features=D, head_dim=6, query_pre_attn_scalar=6**-0.5,
        attn_type=modules.AttentionType.GLOBAL, **options,
    )  # fmt: skip
    at, mask = np.broadcast_to(np.arange(5), (2, 5)), np.ones((2, 5, 5), bool)
    fields: dict[str, Any] = {}
    if options:
        fields["rotary"] = positions.Rotary(options["rope_base_frequency"])
        fields["scores"] = (scores.SoftCap(options["attn_logits_soft_cap"]),)
    theirs = linen(layer, at, None, mask, call=lambda out: out[1], given=(X,), fields=fields)
    for name, x in theirs.arrays.items():
        if "norm" in name:  # Ours, 1 more, has no rounding.
            theirs.arrays[name] = np.round(64 * x) / 64
    return theirs


def kauldron(**options: Any) -> Theirs:
    modules = pytest.importorskip("kauldron.modules.attention", reason="needs kauldron")
    layer = modules.ImprovedMultiHeadDotProductAttention(N, **options)
    return linen(layer, given=(X,))


def flax(**options: Any) -> Theirs:
    layer = nnx.MultiHeadAttention(N, D, **options, decode=False, rngs=nnx.Rngs(0))

    def run(arrays: Any, x: Any) -> Any:
        nnx.update(layer, unflatten_dict(arrays, sep="/"))
        return layer(x)

    state = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    return Theirs(random(flatten_dict(state, sep="/")), run, (X,))


def mlx(**options: Any) -> Theirs:
    mx = pytest.importorskip("mlx.core", reason="needs mlx")
    layer = importlib.import_module("mlx.nn").MultiHeadAttention(D, N, **options)
    given = (X, K, V) if options else (X, X, X)

    def run(arrays: Any, *given: Any) -> np.ndarray:
        layer.load_weights([(name, mx.array(x)) for name, x in arrays.items()])
        return np.array(layer(*map(mx.array, given)))

    arrays = flatten_dict(layer.parameters(), sep=".")
    return Theirs(random(arrays), run, given)


def maxtext() -> Theirs:
    """MaxText's layer by its equations, with rotary and norms, as its package needs an accelerator.

    The scores have no scale. Source: maxtext 0.2.5, `layers/attentions.py` and `embeddings.py`.
    """
    shapes: dict[str, tuple[int, ...]] = {"out/kernel": (N, 6, D)}
    for name, heads in {"query": N, "key": 2, "value": 2}.items():
        shapes |= {f"{name}/kernel": (D, heads, 6), f"{name}/bias": (heads, 6)}
    shapes |= {f"{name}_norm/scale": (6,) for name in ("query", "key")}

    def run(arrays: Any, x: Any) -> np.ndarray:
        p = unflatten_dict(arrays, sep="/")

        def turn(*qk: Any) -> list[np.ndarray]:
            normed = map(oracle.rms_norm, (p["query_norm"], p["key_norm"]), qk, (1e-5, 1e-5))
            return [oracle.rotary(y, np.arange(5)) for y in normed]

        return oracle.multi_head(p, x, turn=turn, scale=1.0)[0]

    arrays = random({name: np.empty(shape) for name, shape in shapes.items()})
    return Theirs(arrays, run, (X,), fields={"rotary": positions.Rotary()})
