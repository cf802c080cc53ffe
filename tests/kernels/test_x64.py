"""Narrow arrays under `jax_enable_x64`, where Python floats and sums of ints are 64 bits wide."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha
from flax_mha import DecoderBlock, MultiHeadAttention, dot_product_attention, generate, variants
from flax_mha.masks import Causal, Lengths, Segments
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding
from flax_mha.positions import DynamicNtk, Rotary
from flax_mha.scores import Alibi, RelativeBias, SoftCap
from tests.kernels.cases import KERNELS, pairs
from tests.support import oracle

T, S, N, K, H = 5, 7, 2, 1, 4
CALLS: dict[str, Any] = {
    "causal": lambda: {"mask": Causal(), "sinks": jnp.zeros(N, jnp.float32)},
    "lengths": lambda: {
        "mask": Lengths(jnp.array([4])) & Segments(jnp.zeros(T, int), jnp.zeros(S, int)),
        "q_positions": jnp.arange(T),
        "scores": (Alibi(), RelativeBias(jnp.zeros((N, 8), jnp.float32)), SoftCap(5.0)),
        "bias": jnp.zeros((T, S), jnp.float32),
    },
    "dropout": lambda: {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
}


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize(
    ("kernel", "dtype", "name"),
    pairs(kernel=KERNELS, dtype=("float32", "bfloat16", "float16", "float64"), name=(*CALLS,)),
)
def test_kernels_keep_dtypes_under_x64(kernel: str, dtype: str, name: str) -> None:
    """With the numbers of the reference kernel."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        qkv = [jnp.asarray(rng.normal(size=(1, *x, H)), dtype) for x in ((T, N), (S, K), (S, K))]

        def run(kernel: str) -> Any:
            def attend(*qkv: jax.Array) -> Any:
                return dot_product_attention(
                    *qkv, kernel=kernel, return_residuals=True, return_weights=True,
                    **CALLS[name](),
                )  # fmt: skip

            results, pull = jax.vjp(attend, *qkv)
            return *results, *pull(jax.tree.map(jnp.ones_like, results))

        wide = jnp.float64 if dtype == "float64" else jnp.float32
        expected = jax.jit(run, static_argnums=0)("reference")
        for n, (got, want) in enumerate(
            zip(jax.jit(run, static_argnums=0)(kernel), expected, strict=True)
        ):
            assert got.dtype == (wide if n == 2 else dtype)
            assert oracle.error(got, want) < (1e-5 if dtype in ("float32", "float64") else 0.05)


ROTARY = Rotary(scaling=DynamicNtk(2.0, 4))
LAYERS: dict[str, Any] = {
    "standard": (MultiHeadAttention, {"rotary": ROTARY, "scores": (Alibi(),), "sinks": True}),
    "sigmoid": (MultiHeadAttention, {"normalizer": "sigmoid"}),
    "forgetting": (variants.ForgettingAttention, {}),
    "differential": (variants.DifferentialAttention, {}),
    "talking heads": (variants.TalkingHeadsAttention, {}),
    "chosen blocks": (variants.ChosenBlocksAttention, {"block": 4, "count": 2, "share": True}),
    "latent": (variants.MultiHeadLatentAttention, {"rotary": Rotary()}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layers_decode_in_float32_under_x64(name: str) -> None:
    with jax.enable_x64(True):
        make, fields = LAYERS[name]
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 16)), jnp.float32)
        layer = make(2, **fields)
        variables = layer.init(jax.random.key(0), x)
        full = layer.apply(variables, x, mask=Causal())
        step = layer.clone(decode=True)
        cache = step.init(jax.random.key(0), x)["cache"]
        apply = jax.jit(lambda v, x: step.apply(v, x, mutable="cache"))
        first, new = apply({**variables, "cache": cache}, x[:, :5])
        last, _ = apply({**variables, **new}, x[:, 5:])
        assert {y.dtype for y in (full, first, last)} == {np.dtype("float32")}
        if name not in ("standard", "sigmoid"):  # These depend on the number of tokens.
            assert oracle.error(jnp.concatenate([first, last], 1), full) < 1e-5


@pytest.mark.slow
def test_nnx_and_beams_under_x64() -> None:
    # Token ids are int64 then, and step counts int32.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        x = jnp.ones((2, 6, 16), jnp.float32)
        layer = flax_mha.nnx.MultiHeadAttention(2, 16, rngs=nnx.Rngs(0))
        layer.init_cache(x.shape, jnp.float32)
        assert layer(x[:, :1], decode=True).dtype == jnp.float32
        block = DecoderBlock(MultiHeadAttention(2, rotary=Rotary()), 16)
        model = LanguageModel(TokenEmbedding(7, 8), Decoder(2, block))
        params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
        drawn = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "rng": jax.random.key(0)}
        for more in ({}, {"beams": 2, "eos": 1}, drawn):
            found = generate(model, params, jnp.array([[1, 2]]), max_new_tokens=3, **more)
            assert jax.tree.leaves(found)[0].shape[0] == 1
