# mypy: disallow-untyped-defs=False
"""Attention of other packages, each as one function of arrays.

Queries are [1, T, N, H], keys and values [1, S, K, H], and outputs have the shape of the queries.
Layers have identities as projections, so that they compute the same as functions. A mask, of
booleans or of numbers to add to the scores, is [1, 1, T, S].
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import interop

KEY, X = jax.random.key(0), jnp.ones((1, 5, 64))
os.environ.setdefault("KERAS_BACKEND", "jax")


class Library(NamedTuple):
    """One row of the page.

    Attributes:
      package: the distribution, whose version is recorded.
      module: the name of the module that has the attention.
      attend: the attention, as a function of the module, queries, keys and values.
      accepts: the function's arguments for `mask`, `numbers`, `causal` and `window`, and `groups`
        if there can be fewer key/value heads.
      layer: returns the initial parameters of a layer of 64 features and 4 heads, given the module,
        under flax_mha's names.
    """

    package: str
    module: str
    attend: Callable[..., Any]
    accepts: dict[str, str]
    layer: Callable[[Any], dict[str, Any]] | None = None

    @property
    def is_torch(self) -> bool:
        """True if arrays are tensors of PyTorch."""
        return self.package in ("torch", "x-transformers", "transformers")

    @property
    def installed(self) -> bool:
        """True if the package can be imported."""
        needed = {self.module.split(".")[0], "torch" if self.is_torch else "jax"}
        return all(map(importlib.util.find_spec, needed))

    def load(self) -> Any:
        """Return the module."""
        return importlib.import_module(self.module)

    def __call__(self, *qkv: Any, **call: Any) -> Any:
        """Call the attention. Other arguments have the names in `accepts`."""
        named = {self.accepts[name]: x for name, x in call.items()}
        return self.attend(self.load(), *qkv, **named)


def converted(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a layer's tensors, under flax_mha's names."""
    return interop.from_layer(tensors, 4)[1]["params"]


def flat(x):
    """Join the heads, as the inputs of layers are."""
    return x.reshape(*x.shape[:2], -1)


def _function(module, *qkv, **call):
    return module.dot_product_attention(*qkv, **call)


def _sown(nnx, *qkv, **call):
    return nnx.dot_product_attention(*qkv, **call, module=nnx.Module())


def _equinox(equinox, q, k, v, mask=None):
    N, D = q.shape[2], q.shape[2] * q.shape[3]
    layer = equinox.nn.MultiheadAttention(N, D, dtype=q.dtype, key=KEY)
    layer = jax.tree.map(lambda x: jnp.eye(D, dtype=q.dtype) if equinox.is_array(x) else x, layer)
    mask = mask if mask is None else mask[0, 0]
    return layer(*(flat(x)[0] for x in (q, k, v)), mask).reshape(q.shape)


def _haiku(haiku, q, k, v, mask=None):
    def layer(*inputs):
        identity = haiku.initializers.Identity()
        return haiku.MultiHeadAttention(*q.shape[2:], w_init=identity)(*inputs, mask)

    inputs = [flat(x) for x in (q, k, v)]
    transformed = haiku.transform(layer)
    return transformed.apply(transformed.init(KEY, *inputs), None, *inputs).reshape(q.shape)


def _keras(keras, q, k, v, mask=None, causal=False, scores=False):
    (N, H), inputs = q.shape[2:], [flat(x) for x in (q, v, k)]
    layer = keras.layers.MultiHeadAttention(N, H, use_bias=False, dtype=q.dtype.name)
    layer.build(*(x.shape for x in inputs))
    layer.set_weights([np.eye(N * H).reshape(x.shape) for x in layer.weights])
    call = {"use_causal_mask": causal, "return_attention_scores": scores}
    out = layer(*inputs, attention_mask=mask if mask is None else mask[0], **call)
    return (out[0] if scores else out).reshape(q.shape)


def _heads_first(attend, qkv, **call):
    return attend(*(x.transpose(1, 2) for x in qkv), enable_gqa=True, **call).transpose(1, 2)


def _sdpa(functional, *qkv, **call):
    return _heads_first(functional.scaled_dot_product_attention, qkv, **call)


def _identity(layer):
    for x in layer.parameters():
        rows = np.eye(x.shape[-1])[np.arange(len(x)) % x.shape[-1]]
        x.copy_(x.new_tensor(rows if x.ndim > 1 else 0))
    return layer.eval()


def _torch_layer(torch, q, k, v, mask=None, weights=True, fast=False):
    D = q.shape[2] * q.shape[3]
    layer = torch.nn.MultiheadAttention(D, q.shape[2], batch_first=True, dtype=q.dtype)
    layer = _identity(layer).train(not fast)
    # The fast implementation runs only if the three are one tensor.
    inputs = [flat(v)] * 3 if fast else map(flat, (q, k, v))
    mask = mask if mask is None else mask[0, 0]
    return layer(*inputs, attn_mask=mask, need_weights=weights)[0].reshape(q.shape)


def _flex(flex, *qkv, mask=None, numbers=None):
    call = {}
    if mask is not None:
        call["block_mask"] = flex.create_block_mask(
            lambda b, n, i, j: mask[0, 0, i, j], None, None, *mask.shape[2:], "cpu"
        )
    if numbers is not None:
        call["score_mod"] = lambda score, b, n, i, j: score + numbers[0, 0, i, j]
    return _heads_first(flex.flex_attention, qkv, **call)


def _x_transformers(x_transformers, q, k, v, mask=None, **options):
    import torch

    (N, H), D = q.shape[2:], k.shape[2] * k.shape[3]
    sizes = {"heads": N, "dim_head": H, "kv_heads": k.shape[2], "dim_context": 2 * D}
    layer = _identity(x_transformers.Attention(N * H, **sizes, **options).to(q.dtype))
    # The context is keys and then values.
    layer.to_v.weight.copy_(layer.to_v.weight.roll(D, 1))
    return layer(flat(q), torch.cat([flat(k), flat(v)], -1), attn_mask=mask).reshape(q.shape)


def _transformers(llama, q, k, v, mask=None, implementation="eager"):
    sizes = {"num_attention_heads": q.shape[2], "num_key_value_heads": k.shape[2]}
    layer = llama.LlamaAttention(llama.LlamaConfig(**sizes, head_dim=q.shape[3]), 0)
    function = {"eager": llama.eager_attention_forward, **llama.ALL_ATTENTION_FUNCTIONS}
    qkv = (x.transpose(1, 2) for x in (q, k, v))
    return function[implementation](layer, *qkv, mask, scaling=q.shape[3] ** -0.5)[0]


LLAMA = "transformers.models.llama.modeling_llama"
MASK, GROUPS = {"mask": "mask"}, {"groups": ""}
BIAS = MASK | {"numbers": "bias"}
FLAX = BIAS | GROUPS | {"causal": "is_causal"}
JAX = FLAX | {"window": "local_window_size"}
EITHER = MASK | {"numbers": "mask"}
KERAS = EITHER | {"causal": "causal"}
CAUSAL = MASK | GROUPS | {"causal": "causal"}
NUMBERS = GROUPS | {"numbers": "mask"}
LIBRARIES = {
    "jax.nn.dot_product_attention": Library("jax", "jax.nn", _function, JAX),
    "tokamax.dot_product_attention": Library("tokamax", "tokamax", _function, JAX),
    "flax.linen": Library(
        "flax", "flax.linen", _function, BIAS | GROUPS,
        lambda nn: nn.MultiHeadDotProductAttention(4).init(KEY, X)["params"],
    ),
    "flax.nnx": Library(
        "flax", "flax.nnx", _function, FLAX,
        lambda nnx: nnx.to_pure_dict(
            nnx.state(nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0)), nnx.Param)
        ),
    ),
    "flax.nnx, sow_weights=True": Library("flax", "flax.nnx", _sown, FLAX),
    "equinox": Library(
        "equinox", "equinox", _equinox, MASK,
        lambda equinox: converted({
            jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(
                equinox.filter(equinox.nn.MultiheadAttention(4, 64, key=KEY), equinox.is_array)
            )
        }),
    ),
    "haiku": Library(
        "dm-haiku", "haiku", _haiku, MASK,
        lambda haiku: converted(haiku.transform(
            lambda x: haiku.MultiHeadAttention(4, 16, w_init_scale=1.0)(x, x, x)
        ).init(KEY, X)),
    ),
    "keras": Library("keras", "keras", _keras, KERAS),
    "keras, return_attention_scores=True": Library(
        "keras", "keras", functools.partial(_keras, scores=True), KERAS
    ),
    "torch SDPA": Library(
        "torch", "torch.nn.functional", _sdpa,
        GROUPS | {"mask": "attn_mask", "numbers": "attn_mask", "causal": "is_causal"},
    ),
    "torch layer": Library(
        "torch", "torch", _torch_layer, EITHER,
        lambda torch: interop.from_torch(
            torch.nn.MultiheadAttention(64, 4).state_dict(), 4
        )[1]["params"],
    ),
    "torch layer, need_weights=False": Library(
        "torch", "torch", functools.partial(_torch_layer, weights=False), EITHER
    ),
    "torch layer, eval() without gradients": Library(
        "torch", "torch", functools.partial(_torch_layer, weights=False, fast=True), EITHER
    ),
    "torch flex_attention": Library(
        "torch", "torch.nn.attention.flex_attention", _flex,
        MASK | GROUPS | {"numbers": "numbers"},
    ),
    "x-transformers": Library(
        "x-transformers", "x_transformers", _x_transformers, CAUSAL,
        lambda x_transformers: converted(
            x_transformers.Attention(64, heads=4, dim_head=16).state_dict()
        ),
    ),
    "x-transformers, flash=True": Library(
        "x-transformers", "x_transformers", functools.partial(_x_transformers, flash=True), CAUSAL
    ),
    "transformers, eager": Library("transformers", LLAMA, _transformers, NUMBERS),
    "transformers, sdpa": Library(
        "transformers", LLAMA, functools.partial(_transformers, implementation="sdpa"), NUMBERS
    ),
}  # fmt: skip
