"""Narrow arrays under `jax_enable_x64`, where Python floats and sums of ints are 64 bits wide."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, dot_product_attention, variants
from flax_mha.masks import Causal
from flax_mha.positions import DynamicNtk, Rotary
from flax_mha.scores import Alibi
from tests.kernels.cases import KERNELS
from tests.support import oracle


@pytest.mark.sampled(0.25, slow=0.2)
@pytest.mark.parametrize("kernel", KERNELS)
def test_results_of_float64_are_as_exact(kernel: str) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v, dout = (jnp.asarray(rng.normal(size=(1, 5, n, 4))) for n in (2, 1, 1, 2))

        def attend(*qkv: jax.Array) -> jax.Array:
            return dot_product_attention(*qkv, mask=Causal(), kernel=kernel)

        out, pull = jax.vjp(jax.jit(attend), q, k, v)
        known = {"allowed": np.tri(5, dtype=bool)}
        exact = oracle.attention_gradients(q, k, v, cotangent=dout, **known)
        assert oracle.error(out, oracle.attention(q, k, v, **known)[0]) < 1e-12
        for got, want in zip(pull(dout), exact, strict=False):
            assert got.dtype == jnp.float64
            assert oracle.error(got, want) < 1e-12


ROTARY = Rotary(scaling=DynamicNtk(2.0, 4))
LAYERS: dict[str, Any] = {
    "standard": (MultiHeadAttention, {"rotary": ROTARY, "scores": (Alibi(),), "sinks": True}),
    "sigmoid": (MultiHeadAttention, {"normalizer": "sigmoid"}),
    "forgetting": (variants.ForgettingAttention, {}),
    "differential": (variants.DifferentialAttention, {}),
    "talking heads": (variants.TalkingHeadsAttention, {}),
    "chosen blocks": (variants.ChosenBlocksAttention, {"block": 4, "count": 2}),
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
