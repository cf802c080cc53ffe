"""Attention of other packages, each as one function of arrays.

Queries are [1, T, N, H], keys and values [1, S, K, H], and so is the output for each query. Layers
have identities as projections, so that they compute the same as functions. A mask is boolean, and a
bias is added to scores. Both are [1, 1, T, S], and go to whichever argument of the package fits.
"""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Library:
    """One row of the page.

    Attributes:
      package: the distribution, whose version is recorded.
      module: the module to import.
      accepts: what can be measured besides the softmax: mask, bias, causal, groups, window.
      attend: the attention.
      parameters: returns the parameters of a new layer of 64 features and 4 heads, by name.
    """

    package: str
    module: str
    accepts: str
    attend: Callable[..., Any]
    parameters: Callable[[], dict[str, Any]] | None = None

    @property
    def is_torch(self) -> bool:
        """True if arguments are tensors."""
        return self.package not in ("jax", "flax", "tokamax", "equinox", "dm-haiku", "keras")

    @property
    def installed(self) -> bool:
        """True if the package can be imported."""
        needed = (self.module, "torch") if self.is_torch else (self.module,)
        return all(importlib.util.find_spec(name.split(".")[0]) for name in needed)


def flat(x: Any) -> Any:
    """Join the heads, as the inputs of layers are."""
    return x.reshape(*x.shape[:2], -1)


def named(tree: Any) -> dict[str, Any]:
    """Return the arrays of a tree by their path."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _jax_nn(q: Any, k: Any, v: Any, causal: bool = False, window: Any = None, **call: Any) -> Any:
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, local_window_size=window, implementation="xla", **call
    )


def _tokamax(q: Any, k: Any, v: Any, causal: bool = False, window: Any = None, **call: Any) -> Any:
    import tokamax

    return tokamax.dot_product_attention(
        q, k, v, is_causal=causal, local_window_size=window, implementation="xla", **call
    )


def _linen(*qkv: Any, **call: Any) -> Any:
    import flax.linen as nn

    return nn.dot_product_attention(*qkv, **call)


def _linen_parameters() -> dict[str, Any]:
    import flax.linen as nn

    return named(nn.MultiHeadDotProductAttention(4).init(jax.random.key(0), jnp.ones((1, 5, 64))))


def _nnx(*qkv: Any, causal: bool = False, sow: bool = False, **call: Any) -> Any:
    from flax import nnx

    module = nnx.Module() if sow else None
    return nnx.dot_product_attention(*qkv, is_causal=causal, module=module, **call)


def _nnx_parameters() -> dict[str, Any]:
    from flax import nnx

    layer = nnx.MultiHeadAttention(4, 64, rngs=nnx.Rngs(0), decode=False)
    return named(nnx.to_pure_dict(nnx.state(layer, nnx.Param)))


def _equinox(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    import equinox

    D = q.shape[2] * q.shape[3]
    layer = equinox.nn.MultiheadAttention(q.shape[2], D, dtype=q.dtype, key=jax.random.key(0))

    def weights(layer: Any) -> list[Any]:
        parts = "query_proj", "key_proj", "value_proj", "output_proj"
        return [getattr(layer, part).weight for part in parts]

    layer = equinox.tree_at(weights, layer, [jnp.eye(D, dtype=q.dtype)] * 4)
    mask = mask if mask is None else jnp.asarray(mask[0, 0])
    return layer(*(flat(jnp.asarray(x))[0] for x in (q, k, v)), mask=mask).reshape(q.shape)


def _equinox_parameters() -> dict[str, Any]:
    import equinox

    layer = equinox.nn.MultiheadAttention(4, 64, key=jax.random.key(0))
    return named(equinox.filter(layer, equinox.is_array))


def _haiku(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    import haiku

    def layer(*qkv: Any) -> Any:
        identity = haiku.initializers.Identity()
        return haiku.MultiHeadAttention(*q.shape[2:], w_init=identity)(*qkv, mask=mask)

    inputs = [flat(jnp.asarray(x)) for x in (q, k, v)]
    transformed = haiku.transform(layer)
    variables = transformed.init(jax.random.key(0), *inputs)
    return transformed.apply(variables, None, *inputs).reshape(q.shape)


def _haiku_parameters() -> dict[str, Any]:
    import haiku

    def layer(x: Any) -> Any:
        return haiku.MultiHeadAttention(4, 16, w_init_scale=1.0)(x, x, x)

    return named(haiku.transform(layer).init(jax.random.key(0), jnp.ones((1, 5, 64))))


def _keras(
    q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None, causal: bool = False,
    scores: bool = False,
) -> Any:  # fmt: skip
    os.environ.setdefault("KERAS_BACKEND", "jax")
    from keras import layers

    (N, H), K = q.shape[2:], k.shape[2]
    options = {"use_bias": False, "dtype": q.dtype.name}
    if N == K:
        layer = layers.MultiHeadAttention(N, H, **options)
    else:
        layer = layers.GroupQueryAttention(H, N, K, **options)
    q, k, v = (flat(jnp.asarray(x)) for x in (q, k, v))
    layer.build(q.shape, v.shape, k.shape)
    wide, narrow = (np.eye(n * H).reshape(n * H, n, H) for n in (N, K))
    layer.set_weights([wide, narrow, narrow, np.eye(N * H).reshape(N, H, N * H)])
    mask = mask if bias is None else bias
    mask = mask if mask is None else mask[0]
    call = {"attention_mask": mask, "use_causal_mask": causal, "return_attention_scores": scores}
    out = layer(q, v, k, **call)
    return (out[0] if scores else out).reshape(*q.shape[:2], N, H)


def _keras_parameters() -> dict[str, Any]:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    from keras import layers

    layer = layers.MultiHeadAttention(4, 16)
    layer.build((1, 5, 64), (1, 5, 64))
    return {weight.path.partition("/")[2]: weight.numpy() for weight in layer.weights}


def _sdpa(q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None, causal: bool = False) -> Any:
    from torch.nn import functional

    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    mask = mask if bias is None else bias
    grouped = q.shape[2] != k.shape[2]
    out = functional.scaled_dot_product_attention(
        *heads_first, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def _torch_layer(
    q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None, weights: bool = True,
    fast: bool = False,
) -> Any:  # fmt: skip
    import torch

    D = q.shape[2] * q.shape[3]
    layer = torch.nn.MultiheadAttention(D, q.shape[2], batch_first=True, dtype=q.dtype)
    layer.in_proj_weight.copy_(torch.eye(D).repeat(3, 1))
    layer.out_proj.weight.copy_(torch.eye(D))
    inputs = [flat(v)] * 3 if fast else [flat(x) for x in (q, k, v)]
    mask = mask if bias is None else bias
    mask = mask if mask is None else mask[0, 0]
    out, _ = layer.train(not fast)(*inputs, attn_mask=mask, need_weights=weights)
    return out.reshape(q.shape)


def _torch_parameters() -> dict[str, Any]:
    import torch

    return dict(torch.nn.MultiheadAttention(64, 4).named_parameters())


def _flex(q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None, causal: bool = False) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Any, n: Any, i: Any, j: Any) -> Any:
        return i >= j if causal else mask[0, 0, i, j]

    def added(score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        return score + bias[0, 0, i, j]

    block_mask = None
    if causal or mask is not None:
        block_mask = create_block_mask(visible, None, None, q.shape[1], k.shape[1], device="cpu")
    out = flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask,
        score_mod=None if bias is None else added, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)


def _x_transformers(
    q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, flash: bool = False
) -> Any:
    import torch
    from x_transformers import Attention

    (N, H), D = q.shape[2:], k.shape[2] * k.shape[3]
    sizes = {"dim_context": 2 * D, "dim_head": H, "kv_heads": k.shape[2]}
    layer = Attention(N * H, heads=N, causal=causal, flash=flash, **sizes).to(q.dtype).eval()
    for weight in layer.parameters():
        weight.copy_(torch.eye(*weight.shape))
    layer.to_v.weight.copy_(torch.eye(2 * D)[D:])
    context = torch.cat([flat(k), flat(v)], -1)
    return layer(flat(q), context=context, attn_mask=mask).reshape(q.shape)


def _x_transformers_parameters() -> dict[str, Any]:
    from x_transformers import Attention

    return dict(Attention(64, heads=4, dim_head=16).named_parameters())


def _timm(q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None, fused: bool = True) -> Any:
    import torch
    from timm.layers import Attention

    (N, H), D = q.shape[2:], 3 * q.shape[2] * q.shape[3]
    layer = Attention(D, N, H, D // 3, dtype=q.dtype).eval()
    layer.fused_attn = fused
    layer.qkv.weight.copy_(torch.eye(D))
    layer.proj.weight.copy_(torch.eye(D // 3))
    layer.proj.bias.zero_()
    mask = mask if bias is None else bias
    return layer(torch.cat([flat(x) for x in (q, k, v)], -1), attn_mask=mask).reshape(q.shape)


def _timm_parameters() -> dict[str, Any]:
    from timm.layers import Attention

    return dict(Attention(64, 4).named_parameters())


def _transformers(q: Any, k: Any, v: Any, bias: Any = None, implementation: str = "eager") -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama

    (N, H), K = q.shape[2:], k.shape[2]
    sizes = {"num_attention_heads": N, "num_key_value_heads": K, "head_dim": H}
    layer = modeling_llama.LlamaAttention(LlamaConfig(hidden_size=N * H, **sizes), 0)
    function = modeling_llama.eager_attention_forward
    if implementation != "eager":
        function = modeling_llama.ALL_ATTENTION_FUNCTIONS[implementation]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    return function(layer, *heads_first, bias, scaling=H**-0.5)[0]


def _torch(module: str, accepts: str, attend: Any, parameters: Any = None) -> Library:
    """Return the row of a package that computes with PyTorch."""
    return Library(module.replace("_", "-"), module, accepts, attend, parameters)


partial = functools.partial
EVERYTHING = "mask bias causal groups window"
LIBRARIES = {
    "jax.nn.dot_product_attention": Library("jax", "jax", EVERYTHING, _jax_nn),
    "tokamax.dot_product_attention": Library("tokamax", "tokamax", EVERYTHING, _tokamax),
    "flax.linen": Library("flax", "flax", "mask bias groups", _linen, _linen_parameters),
    "flax.nnx": Library("flax", "flax", "mask bias causal groups", _nnx, _nnx_parameters),
    "flax.nnx, sow_weights=True": Library(
        "flax", "flax", "mask bias causal groups", partial(_nnx, sow=True)
    ),
    "equinox": Library("equinox", "equinox", "mask", _equinox, _equinox_parameters),
    "haiku": Library("dm-haiku", "haiku", "mask", _haiku, _haiku_parameters),
    "keras": Library("keras", "keras", "mask bias causal groups", _keras, _keras_parameters),
    "keras, return_attention_scores=True": Library(
        "keras", "keras", "mask bias causal groups", partial(_keras, scores=True)
    ),
    "torch SDPA": _torch("torch", "mask bias causal groups", _sdpa),
    "torch layer": _torch("torch", "mask bias", _torch_layer, _torch_parameters),
    "torch layer, need_weights=False": _torch(
        "torch", "mask bias", partial(_torch_layer, weights=False)
    ),
    "torch layer, eval() without gradients": _torch(
        "torch", "mask bias", partial(_torch_layer, weights=False, fast=True)
    ),
    "torch flex_attention": _torch("torch", "mask bias causal groups", _flex),
    "x-transformers": _torch(
        "x_transformers", "mask causal groups", _x_transformers, _x_transformers_parameters
    ),
    "x-transformers, flash=True": _torch(
        "x_transformers", "mask causal groups", partial(_x_transformers, flash=True)
    ),
    "timm": _torch("timm", "mask bias", _timm, _timm_parameters),
    "timm, not fused": _torch("timm", "mask bias", partial(_timm, fused=False)),
    "transformers, eager": _torch("transformers", "bias groups", _transformers),
    "transformers, sdpa": _torch(
        "transformers", "bias groups", partial(_transformers, implementation="sdpa")
    ),
}  # fmt: skip
