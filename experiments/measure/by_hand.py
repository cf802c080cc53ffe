"""Layers and models as one writes them by hand for one chip, to compare with.

Einsums, with splash attention on TPUs and cuDNN's attention on GPUs: for causal attention in
bfloat16 and nothing else. Nothing guards against NaN or rows without keys.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Weights = dict[str, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def layer(
    attend: Attend, heads_first: bool, rotates: bool, normalizes: bool, w: Weights, x: jax.Array
) -> jax.Array:
    """Apply a layer to x [B, T, D], with weights q, k, v [D, N, H] and o [N, H, D] in float32.

    `attend` takes [B, N, T, H] if `heads_first`, else [B, T, N, H].
    """
    w = {name: a.astype(x.dtype) for name, a in w.items()}
    order = "bnth" if heads_first else "btnh"
    q, k, v = (jnp.einsum(f"btd,dnh->{order}", x, w[name]) for name in "qkv")
    if normalizes:
        q, k = _normalize(q, w["q_scale"]), _normalize(k, w["k_scale"])
    if rotates:
        axis = 2 if heads_first else 1
        q, k = _rotate(q, axis), _rotate(k, axis)
    return jnp.einsum(f"{order},nhd->btd", attend(q, k, v), w["o"])


def splash(T: int, N: int, H: int) -> Attend:
    """Return causal attention by JAX's TPU kernel, with the blocks that suit v5e and v6e."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: Any = {f"block_{name}": min(512, T) for name in names}
    blocks = splash_attention_kernel.BlockSizes(**sizes)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))] * N)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # A kernel holds arrays of the mask, which belong to one trace.
        kernel: Any = splash_attention_kernel.make_splash_mha(
            mask=mask, head_shards=1, q_seq_shards=1, block_sizes=blocks
        )
        return jax.vmap(kernel)((q * H**-0.5).astype(q.dtype), k, v)

    return attend


def tokamax_library() -> Any:
    """Return the module tokamax, which may not parse this program's flags."""
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    return tokamax


def tokamax(*qkv: jax.Array) -> Any:
    """Compute causal attention of [B, T, N, H] by tokamax's TPU kernel, with its own blocks."""
    attend = tokamax_library().dot_product_attention
    return attend(*qkv, is_causal=True, implementation="mosaic_tpu")


def cross_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls tokamax, for a chip that is not there."""

    def run(*arguments: Any) -> Any:
        with tokamax_library().config.cross_compile(True):
            return function(*arguments)

    return run


def cudnn(H: int, bias: jax.Array | None = None) -> Attend:
    """Return causal attention by cuDNN, or attention with a bias [B|1, N|1, T, S]."""
    from flax_mha.kernels.cudnn.primitives import CudnnCall, backward, forward

    call = CudnnCall(H**-0.5, bias is None, None, False)

    def operands(*qkv: jax.Array) -> tuple[Any, ...]:
        return *qkv, bias, *(jnp.full(len(x), x.shape[1], jnp.int32) for x in qkv[:2]), None

    @jax.custom_vjp
    def attend(*qkv: jax.Array) -> jax.Array:
        return forward(call, *operands(*qkv))[0]

    def run(*qkv: jax.Array) -> tuple[jax.Array, Any]:
        out, lse = forward(call, *operands(*qkv))
        return out, (qkv, lse, out)

    def pull(saved: Any, dout: jax.Array) -> tuple[jax.Array, ...]:
        qkv, *results = saved
        return backward(call, *operands(*qkv), *results, dout)[:3]

    attend.defvjp(run, pull)
    return attend


def einsum(mask: jax.Array | None = None) -> Attend:
    """Return attention by two einsums and a float32 softmax, for [B, T, N, H]."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        s = jnp.einsum("bqnh,bknh->bnqk", q, k, preferred_element_type=jnp.float32)
        s = s * q.shape[-1] ** -0.5
        s = s if mask is None else jnp.where(mask, s, -1e30)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(s).astype(v.dtype), v)

    return attend


def decoding_step(
    pads: bool, cache: dict[str, jax.Array], w: Weights, x: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Apply a layer to tokens [B, T, D], after those in a cache of k and v [B, K, S, H].

    `pads` fills the rows of a matmul to eight, because the matrix unit of TPUs takes eight at once.
    """
    length, (B, K, S, H), T = cache["length"], cache["k"].shape, x.shape[1]
    q, k, v = (jnp.einsum("btd,dnh->bnth", x, w[name]) for name in "qkv")
    places = length[:, None] + jnp.arange(T)[None]
    at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], places[:, None]
    k, v = (
        cache[name].at[at].set(new, mode="drop", unique_indices=True)
        for name, new in (("k", k), ("v", v))
    )
    used = q.shape[1] // K * T
    rows = max(8, used) if pads else used

    def padded(a: jax.Array) -> jax.Array:
        return jnp.pad(a, ((0, 0), (0, 0), (0, rows - used), (0, 0)))

    q = padded(q.reshape(B, K, used, H))
    s = jnp.einsum("bkmh,bksh->bkms", q, k, preferred_element_type=jnp.float32)[:, :, :used]
    ends = jnp.tile(places, (1, used // T))[:, None, :, None]
    seen = jnp.arange(S)[None, None, None] <= ends
    s = jnp.where(seen, s * H**-0.5, -1e30)
    p = jnp.exp(s - s.max(-1, keepdims=True))
    z = jnp.einsum(
        "bkms,bksh->bkmh", padded(p.astype(v.dtype)), v, preferred_element_type=jnp.float32
    )
    z = (z[:, :, :used] / p.sum(-1, keepdims=True)).reshape(B, -1, T, H).astype(x.dtype)
    return jnp.einsum("bnth,nhd->btd", z, w["o"]), {"k": k, "v": v, "length": length + T}


def language_model(
    attend: Attend, heads_first: bool, w: dict[str, Any], tokens: jax.Array
) -> jax.Array:
    """Return logits [B, T, V] of a pre-norm model with RMS norms and GELU.

    Layers are a list of weights, or run by a scan over stacked weights.
    """
    table = w["table"].astype(jnp.bfloat16)

    def block(x: jax.Array, w: Weights) -> tuple[jax.Array, None]:
        heads = {name: w[name] for name in "qkvo"}
        x = x + layer(attend, heads_first, False, False, heads, _rms(x, w["norm"]))
        up, down = (w[name].astype(x.dtype) for name in ("up", "down"))
        return x + jax.nn.gelu(_rms(x, w["mlp_norm"]) @ up) @ down, None

    x = table[tokens]
    if isinstance(w["layers"], dict):
        x = lax.scan(block, x, w["layers"])[0]
    else:
        for weights in w["layers"]:
            x = block(x, weights)[0]
    return jnp.einsum("btd,vd->btv", _rms(x, w["norm"]), table, preferred_element_type=jnp.float32)


def _rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    size = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * size * scale).astype(x.dtype)


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Apply a layer norm without a bias, as `normalize_qk` of Flax's layer."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def _rotate(x: jax.Array, axis: int) -> jax.Array:
    """Rotate the halves of each head's features by the positions along an axis."""
    half = x.shape[-1] // 2
    turns = jnp.arange(x.shape[axis])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    turns = jnp.expand_dims(turns, [*range(1, x.ndim - axis - 1)])
    cos, sin = jnp.cos(turns), jnp.sin(turns)
    one, other = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1).astype(x.dtype)
