"""Attention of other packages, each as one function of arrays.

Queries are [1, T, N, H], keys and values [1, S, K, H], and the output is like the queries. Layers
have identities as projections, so that they compute the same as functions. A mask, of booleans or
of numbers that are added to scores, is [1, 1, T, S].
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

KEY, X = jax.random.key(0), jnp.ones((1, 5, 64))
os.environ.setdefault("KERAS_BACKEND", "jax")


class Library(NamedTuple):
    """One row of the page.

    Attributes:
      package: the distribution, whose version is recorded.
      module: the module to import.
      attend: the attention, or its name in the module.
      accepts: the arguments for `mask`, `numbers`, `causal` and `window`, and `groups` if there may
        be fewer key/value heads.
      layer: returns a layer of 64 features and 4 heads, or its parameters, given the module.
    """

    package: str
    module: str
    attend: Any
    accepts: dict[str, str]
    layer: Callable[[Any], Any] | None = None

    @property
    def is_torch(self) -> bool:
        """True if arrays are tensors of PyTorch."""
        return self.package in ("torch", "x-transformers", "transformers")

    @property
    def installed(self) -> bool:
        """True if the package can be imported."""
        needed = {self.module.split(".")[0], "torch" if self.is_torch else "jax"}
        return all(map(importlib.util.find_spec, needed))

    def function(self) -> Callable[..., Any]:
        """Return the attention."""
        module = importlib.import_module(self.module)
        return getattr(module, self.attend) if isinstance(self.attend, str) else self.attend

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of a new layer by their name or path."""
        layer = self.layer and self.layer(importlib.import_module(self.module))
        if self.is_torch and layer:
            return dict(layer.named_parameters())
        leaves = jax.tree_util.tree_leaves_with_path(layer)
        return {jax.tree_util.keystr(path): x for path, x in leaves if hasattr(x, "shape")}


def flat(x):
    """Join the heads, as the inputs of layers are."""
    return x.reshape(*x.shape[:2], -1)


def _sown(q, k, v, bias=None, mask=None, is_causal=False):
    from flax import nnx

    module = nnx.Module()
    return nnx.dot_product_attention(q, k, v, bias, mask, is_causal=is_causal, module=module)


def _equinox(q, k, v, mask=None):
    import equinox

    N, D = q.shape[2], q.shape[2] * q.shape[3]
    layer = equinox.nn.MultiheadAttention(N, D, dtype=q.dtype, key=KEY)
    layer = jax.tree.map(lambda x: jnp.eye(D, dtype=q.dtype) if equinox.is_array(x) else x, layer)
    mask = mask if mask is None else mask[0, 0]
    return layer(*(flat(x)[0] for x in (q, k, v)), mask).reshape(q.shape)


def _haiku(q, k, v, mask=None):
    import haiku

    def layer(*inputs):
        identity = haiku.initializers.Identity()
        return haiku.MultiHeadAttention(*q.shape[2:], w_init=identity)(*inputs, mask)

    inputs = [flat(x) for x in (q, k, v)]
    transformed = haiku.transform(layer)
    return transformed.apply(transformed.init(KEY, *inputs), None, *inputs).reshape(q.shape)


def _keras(q, k, v, mask=None, causal=False, scores=False):
    from keras.layers import MultiHeadAttention

    (N, H), inputs = q.shape[2:], [flat(x) for x in (q, v, k)]
    layer = MultiHeadAttention(N, H, use_bias=False, dtype=q.dtype.name)
    layer.build(*(x.shape for x in inputs))
    layer.set_weights([np.eye(N * H).reshape(x.shape) for x in layer.weights])
    call = {"use_causal_mask": causal, "return_attention_scores": scores}
    out = layer(*inputs, attention_mask=mask if mask is None else mask[0], **call)
    return (out[0] if scores else out).reshape(q.shape)


def _sdpa(q, k, v, mask=None, causal=False):
    from torch.nn.functional import scaled_dot_product_attention

    qkv = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    out = scaled_dot_product_attention(*qkv, mask, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def _identity(layer):
    for x in layer.parameters():
        rows = np.eye(x.shape[-1])[np.arange(len(x)) % x.shape[-1]]
        x.copy_(x.new_tensor(rows if x.ndim > 1 else 0))
    return layer.eval()


def _torch_layer(q, k, v, mask=None, weights=True, fast=False):
    import torch

    D = q.shape[2] * q.shape[3]
    layer = torch.nn.MultiheadAttention(D, q.shape[2], batch_first=True, dtype=q.dtype)
    layer = _identity(layer).train(not fast)
    inputs = [flat(v)] * 3 if fast else map(flat, (q, k, v))
    mask = mask if mask is None else mask[0, 0]
    return layer(*inputs, attn_mask=mask, need_weights=weights)[0].reshape(q.shape)


def _flex(q, k, v, mask=None, numbers=None):
    from torch.nn.attention import flex_attention as flex

    def visible(b, n, i, j):
        return mask[0, 0, i, j]

    def added(score, b, n, i, j):
        return score if numbers is None else score + numbers[0, 0, i, j]

    sizes = None, None, q.shape[1], k.shape[1], "cpu"
    block_mask = mask if mask is None else flex.create_block_mask(visible, *sizes)
    qkv = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    return flex.flex_attention(*qkv, added, block_mask, enable_gqa=grouped).transpose(1, 2)


def _x_transformers(q, k, v, mask=None, **options):
    import torch
    from x_transformers import Attention

    (N, H), D = q.shape[2:], k.shape[2] * k.shape[3]
    sizes = {"heads": N, "dim_head": H, "kv_heads": k.shape[2], "dim_context": 2 * D}
    layer = _identity(Attention(N * H, **sizes, **options).to(q.dtype))
    # The context is keys and then values.
    layer.to_v.weight.copy_(torch.eye(2 * D)[D:])
    context = torch.cat([flat(k), flat(v)], -1)
    return layer(flat(q), context, attn_mask=mask).reshape(q.shape)


def _transformers(q, k, v, mask=None, implementation="eager"):
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    sizes = {"num_attention_heads": q.shape[2], "num_key_value_heads": k.shape[2]}
    layer = llama.LlamaAttention(LlamaConfig(**sizes, head_dim=q.shape[3]), 0)
    function = {"eager": llama.eager_attention_forward, **llama.ALL_ATTENTION_FUNCTIONS}
    qkv = (x.transpose(1, 2) for x in (q, k, v))
    return function[implementation](layer, *qkv, mask, scaling=q.shape[3] ** -0.5)[0]


partial = functools.partial
MASK, GROUPS = {"mask": "mask"}, {"groups": ""}
BIAS = MASK | {"numbers": "bias"}
FLAX = BIAS | GROUPS | {"causal": "is_causal"}
JAX = FLAX | {"window": "local_window_size"}
EITHER = MASK | {"numbers": "mask"}
KERAS = EITHER | {"causal": "causal"}
CAUSAL = GROUPS | {"causal": "causal"}
LIBRARIES = {
    "jax.nn.dot_product_attention": Library("jax", "jax.nn", "dot_product_attention", JAX),
    "tokamax.dot_product_attention": Library("tokamax", "tokamax", "dot_product_attention", JAX),
    "flax.linen": Library(
        "flax", "flax.linen", "dot_product_attention", BIAS | GROUPS,
        lambda nn: nn.MultiHeadDotProductAttention(4).init(KEY, X),
    ),
    "flax.nnx": Library(
        "flax", "flax.nnx", "dot_product_attention", FLAX,
        lambda nnx: nnx.state(nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0))),
    ),
    "flax.nnx, sow_weights=True": Library("flax", "flax.nnx", _sown, FLAX),
    "equinox": Library(
        "equinox", "equinox", _equinox, MASK,
        lambda equinox: equinox.nn.MultiheadAttention(4, 64, key=KEY),
    ),
    "haiku": Library(
        "dm-haiku", "haiku", _haiku, MASK,
        lambda haiku: haiku.transform(
            lambda x: haiku.MultiHeadAttention(4, 16, w_init_scale=1.0)(x, x, x)
        ).init(KEY, X),
    ),
    "keras": Library("keras", "keras", _keras, KERAS),
    "keras, return_attention_scores=True": Library(
        "keras", "keras", partial(_keras, scores=True), KERAS
    ),
    "torch SDPA": Library("torch", "torch", _sdpa, EITHER | CAUSAL),
    "torch layer": Library(
        "torch", "torch", _torch_layer, EITHER,
        lambda torch: torch.nn.MultiheadAttention(64, 4),
    ),
    "torch layer, need_weights=False": Library(
        "torch", "torch", partial(_torch_layer, weights=False), EITHER
    ),
    "torch layer, eval() without gradients": Library(
        "torch", "torch", partial(_torch_layer, weights=False, fast=True), EITHER
    ),
    "torch flex_attention": Library(
        "torch", "torch", _flex, MASK | GROUPS | {"numbers": "numbers"}
    ),
    "x-transformers": Library(
        "x-transformers", "x_transformers", _x_transformers, MASK | CAUSAL,
        lambda x_transformers: x_transformers.Attention(64, heads=4, dim_head=16),
    ),
    "x-transformers, flash=True": Library(
        "x-transformers", "x_transformers", partial(_x_transformers, flash=True), MASK | CAUSAL
    ),
    "transformers, eager": Library(
        "transformers", "transformers", _transformers, GROUPS | {"numbers": "mask"}
    ),
    "transformers, sdpa": Library(
        "transformers", "transformers", partial(_transformers, implementation="sdpa"),
        GROUPS | {"numbers": "mask"},
    ),
}  # fmt: skip
