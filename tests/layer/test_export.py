"""Programs of `jax.export` with symbolic batch and lengths, against NumPy in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from flax_mha import (
    Capture,
    DecoderBlock,
    EncoderBlock,
    LanguageModel,
    MultiHeadAttention,
    Platform,
    cache,
    dot_product_attention,
    explain,
    masks,
)
from flax_mha.models import Decoder, TokenEmbedding
from flax_mha.positions import PositionEmbedding, Rotary
from tests.support import oracle
from tests.support.oracle import error, random_like

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
B, N, M, D = 2, 5, 7, 8
X = jnp.ones((1, 4, D))
LAYER = MultiHeadAttention(2, num_kv_heads=1, rotary=Rotary())
TOKENS = jnp.ones((1, 4), int)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("checkpointed", "decode")]


def exported(
    fn: Callable[..., Any], *shapes: str, dtypes: Any = (), bounds: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Return the exported program for axes such as "b, n, 8"."""
    scope = export.SymbolicScope(bounds)
    dtypes = dtypes or ["float32"] * len(shapes)
    args = [
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return export.export(jax.jit(fn))(*args).call


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def attended(kernel: str) -> Callable[..., Any]:
    def call(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, dout: jax.Array) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            out, seen = dot_product_attention(
                q, k, v, mask=masks.Causal() & masks.Lengths(lengths), kernel=kernel,
                q_positions=2, capture=Capture(("entropy",)),
            )  # fmt: skip
            return (out * dout).sum(), (out, seen["entropy"])

        grads, outs = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return *outs, *grads

    return call


@pytest.mark.sampled(0.3, slow=0.5)
@pytest.mark.parametrize("kernel", ["reference", "blockwise", *SLOW])
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exported_kernels_match_formula(kernel: str, large: bool) -> None:
    """Outputs and gradients, for one tile and for many."""
    n = "3" if kernel == "decode" else "n"
    keyed = "b, m, 1, 4"
    call = exported(
        attended(kernel), f"b, {n}, 2, 4", keyed, keyed, "b", f"b, {n}, 2, 4",
        dtypes=["float32"] * 3 + ["int32", "float32"],
    )  # fmt: skip
    T, S = (3 if kernel == "decode" else 300 if large else N), 1100 if large else M
    q, dout, k, v = normal(B, T, 2, 4), normal(B, T, 2, 4), normal(B, S, 1, 4), normal(B, S, 1, 4)
    lengths = np.array([S, 3], np.int32)
    out, entropy, *grads = call(q, k, v, lengths, dout)
    i, j = np.arange(T)[:, None] + 2, np.arange(S)
    allowed = (j <= i) & (j < lengths[:, None, None, None])
    expected, _, weights = oracle.attention(q, k, v, allowed=allowed)
    assert error(out, expected) < 1e-5
    some = np.where(weights > 0, weights, 1.0)
    np.testing.assert_allclose(entropy, -(some * np.log(some)).sum(-1), atol=1e-5)
    derived = oracle.attention_gradients(q, k, v, cotangent=dout, allowed=allowed)
    assert max(map(error, grads, derived[:3])) < 1e-5


@pytest.mark.slow
def test_exported_layer_block_and_model_match() -> None:
    block = EncoderBlock(LAYER, 16)
    model = LanguageModel(
        TokenEmbedding(11, D), Decoder(2, DecoderBlock(LAYER, 16), scan=True),
        position_embedding=PositionEmbedding(max_length=16),
    )  # fmt: skip
    modules = ((LAYER, X), (block, X), (model, TOKENS))
    params = [random_like(jax.eval_shape(module.init, KEY, x)) for module, x in modules]

    def apply(x: jax.Array, tokens: jax.Array, lengths: jax.Array) -> list[jax.Array]:
        each = zip(modules, params, (x, x, tokens), strict=True)
        return [module.apply(own, x, lengths=lengths) for (module, _), own, x in each]

    call = exported(apply, f"b, n, {D}", "b, n", "b", dtypes=["float32", "int32", "int32"])
    tokens, lengths = RNG.integers(0, 11, (B, N)).astype(np.int32), np.array([N, 2], np.int32)
    given = normal(B, N, D), tokens, lengths
    assert max(map(error, call(*given), jax.jit(apply)(*given))) < 1e-5


@pytest.mark.sampled(0.3, slow=0.5)
@pytest.mark.parametrize("tokens", ["1", "n"])
def test_exported_decoding(tokens: str) -> None:
    """A step, and a prompt that provably fits. For other prompts the error states the rule."""
    layer, T = LAYER.clone(decode=True), 1 if tokens == "1" else 3
    params = random_like(jax.eval_shape(LAYER.init, KEY, X))

    def step(x: jax.Array, key: jax.Array, value: jax.Array, length: jax.Array) -> Any:
        held = {"cache": {"kv": cache.KVCache(key, value, length)}}
        y, new = layer.apply({**params, **held}, x, mutable=["cache"])
        return y, new["cache"]["kv"].length

    slots = f"b, 1, 9, {D // 2}"
    axes = f"b, {tokens}, {D}", slots, slots, "b"
    dtypes = ["float32"] * 3 + ["int32"]
    bounds = ("n <= 9",) if tokens == "n" else ()
    call = exported(step, *axes, dtypes=dtypes, bounds=bounds)
    given = normal(B, T, D), normal(B, 1, 9, 4), normal(B, 1, 9, 4), np.array([3, 5], np.int32)
    for ours, expected in zip(call(*given), jax.jit(step)(*given), strict=True):
        assert error(ours, expected) < 1e-5
    if tokens == "n":
        with pytest.raises(ValueError, match=r"at most S, K, H\].*got \(b, n, 1, 4\)"):
            exported(step, *axes, dtypes=dtypes)


@pytest.mark.parametrize(
    ("platform", "kernels"), [("tpu", ("splash", "flex")), ("gpu", ("cudnn",))]
)
def test_gpu_and_tpu_kernels_refuse_symbolic_sizes(platform: str, kernels: tuple[str, ...]) -> None:
    b, n = export.symbolic_shape("b, n")
    q = jax.ShapeDtypeStruct((b, n, 2, 64), jnp.bfloat16)
    on = Platform("gpu", "NVIDIA H200", cudnn=(9, 20, 0)) if platform == "gpu" else Platform("tpu")
    found = explain(q, q, q, mask=masks.Causal(), platform=on)
    assert found.chosen == "blockwise"
    for name in kernels:
        assert found.refused[name].startswith("needs static sizes, got q (b, n, 2, 64)")
