"""Layers and models on meshes have the outputs and gradients of one device."""

import itertools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import (
    MLP,
    Classifier,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
    masks,
    sharding,
)
from flax_mha import nnx as flax_mha_nnx
from flax_mha.models import Decoder, LanguageModel, PatchEmbedding, TokenEmbedding, Translator
from flax_mha.positions import Rotary
from tests.sharding import head_process
from tests.sharding.test_grouped_heads import LAYERS
from tests.support import processes
from tests.support.meshes import (
    BACKWARD,
    EIGHT,
    FORWARD,
    FOUR,
    GROUPED,
    KEY,
    KINDS,
    MIXED,
    RNG,
    B,
    X,
    changed,
    compare,
    compare_model,
    described,
    on,
)
from tests.support.oracle import error, random_like


class Reader(nn.Module):
    """A translator from a text to itself."""

    translator: Translator

    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        return self.translator(x, x, deterministic=deterministic)


# Without biases: the softmax cancels the key bias, so its gradient is 0.
CROSS = MultiHeadAttention(8, use_bias=False)
LAYER = MultiHeadAttention(8, num_kv_heads=4, rotary=Rotary(), dropout_rate=0.1)
# One layer: several would take longer to compile.
ENCODER = Encoder(1, EncoderBlock(LAYER, 64, gated=True, dropout_rate=0.1))
TOKENS = RNG.integers(0, 16, (B, 12))
# By name: a model, its inputs and the rules.
MODELS: dict[str, tuple[nn.Module, Any, Any]] = {
    "encoder": (ENCODER, X, sharding.RULES),
    "scanned and recomputed": (
        Encoder(2, EncoderBlock(LAYER, 64, norm="rmsnorm", remat=True), scan=True), X,
        sharding.RULES,
    ),
    "FSDP": (ENCODER, X, changed(embed="data")),
    "sequence parallel norms": (ENCODER, X, changed(norm_length="model")),
    "everything by positions": (
        ENCODER, X, changed(batch=None, length="data", norm_length=("data", "model")),
    ),
    "heads and context": (LAYER.clone(mask=masks.Causal()), X, FOUR),
    "rows and context": (LAYER.clone(mask=masks.Causal()), X, EIGHT),
    "images": (
        Classifier(PatchEmbedding(2, 32), ENCODER, 10),
        RNG.normal(size=(B, 8, 8, 1)).astype(np.float32), sharding.RULES,
    ),
    "language model": (
        LanguageModel(TokenEmbedding(16, 32), Decoder(2, DecoderBlock(LAYER, 64), scan=True)),
        TOKENS, changed(embed="data"),
    ),
    "translator": (
        Reader(
            Translator(
                Encoder(1, EncoderBlock(LAYER, 64)),
                LanguageModel(
                    TokenEmbedding(16, 32),
                    Decoder(1, DecoderBlock(LAYER, 64, cross_attention=CROSS)), tied=False,
                ),
            )
        ),
        TOKENS, sharding.RULES,
    ),
    "tokens": (
        Classifier(TokenEmbedding(16, 32), ENCODER, 10, "sinusoidal", 0.1), TOKENS,
        changed(embed="data"),
    ),
}  # fmt: skip
# The kinds alternate. Slow models get explicit axes, which compile faster.
KIND = dict(zip(MODELS, itertools.cycle(KINDS))) | {
    "language model": "Explicit", "translator": "Explicit",
}  # fmt: skip
OF_MIXED = ("encoder", "FSDP", "heads and context", "rows and context")


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("encoder", "Explicit"), *KIND.items(), *itertools.product(OF_MIXED, MIXED)],
)
def test_models_on_meshes_match_one_device(name: str, kind: str) -> None:
    compare_model(*MODELS[name][:2], kind, MODELS[name][2], bounds=(5 * FORWARD, 2 * BACKWARD))


# Rows over ("data", "group"), model features of parameters over "group".
ROWS = ("data", "group")
FSDP = changed(batch=ROWS, embed="group")
SHARED = MultiHeadAttention(8, num_kv_heads=2, gate="head", rotary=Rotary())
BLOCK = EncoderBlock(MultiHeadAttention(8, rotary=Rotary()), 64, gated=True)
WITH_FSDP: dict[str, tuple[nn.Module, Any]] = {
    "layer": (SHARED, FSDP),
    "layer with one key head": (MultiHeadAttention(8, num_kv_heads=1, rotary=Rotary()), FSDP),
    "MLP": (MLP(64), FSDP),
    "block with sharded norms": (BLOCK, changed(batch=ROWS, embed="group", norm_length="model")),
    "scanned and recomputed": (
        Encoder(2, EncoderBlock(SHARED, 64, norm="rmsnorm", remat=True), scan=True), FSDP,
    ),
    "two layers": (Encoder(2, BLOCK), FSDP),
    "rows over one axis": (BLOCK, changed(batch="data", embed="data")),
    "both axes for both": (SHARED, changed(batch=ROWS, embed=ROWS)),
    "rows elsewhere": (BLOCK, changed(batch="data", embed="group")),
    "positions over an axis": (
        BLOCK,
        changed(batch=ROWS, embed="group", length="model", heads=None, kv_heads=None, mlp=None),
    ),
}  # fmt: skip
EXAMPLES = RNG.normal(size=(8, 16, 32)).astype(np.float32)


@pytest.mark.sampled(0.015)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WITH_FSDP)
def test_fsdp_matches_one_device(name: str, kind: str) -> None:
    model, rules = WITH_FSDP[name]
    bounds = 5 * FORWARD, 2 * BACKWARD
    compare_model(model, EXAMPLES, kind, rules, (2, 2, 2), bounds=bounds)


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("kind", KINDS)
def test_nnx_layer_matches_one_device(kind: str) -> None:
    layer = flax_mha_nnx.MultiHeadAttention(8, 32, rotary=Rotary(), rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    state = jax.tree.map(lambda x: RNG.normal(size=x.shape).astype(np.float32) / 4, state)

    def apply(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x)

    bounds = 5 * FORWARD, 2 * BACKWARD
    compare(apply, (state, EXAMPLES), kind, FSDP, [P(), P(ROWS)], (2, 2, 2), bounds=bounds)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_left_to_xla_on_cpus(kind: str) -> None:
    """XLA:CPU aborts the process at the reduce-scattered gradients of bfloat16."""
    model = SHARED.clone(dtype=jnp.bfloat16)
    params = random_like(jax.eval_shape(model.init, KEY, EXAMPLES))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply(params, x).astype(jnp.float32) * x)

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    wanted = gradient(params, EXAMPLES)
    with on(kind, FSDP, (2, 2, 2)) as mesh:
        places = jax.tree.map(lambda x: x.sharding, described(model, EXAMPLES))
        x = jax.device_put(EXAMPLES, NamedSharding(mesh, P(ROWS)))
        got = jax.device_get(gradient(jax.device_put(params, places), x))
    a, b = (np.concatenate([x.ravel() for x in jax.tree.leaves(tree)]) for tree in (got, wanted))
    assert error(a, b) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_shared_heads_match_one_device(name: str, kind: str) -> None:
    """In float64: some gradients are sums whose terms cancel except for rounding."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        layer = LAYERS[name].clone(dtype=jnp.float64, param_dtype=jnp.float64)
        x = np.asarray(X, np.float64)
        bounds = 1e-11, 1e-11
        compare_model(layer, x, kind, GROUPED, (1, 4, 2), bounds=bounds, atol=1e-11)


@pytest.mark.slow
def test_heads_and_slots_over_processes_match_one_device(tmp_path: Path) -> None:
    """Values and gradients of a layer, and a few steps of decoding with their cache."""
    names = {name for name, *_ in head_process.cases()}
    for told in processes.run_together("tests.sharding.head_process", 4, tmp_path / "logs"):
        assert told.keys() == names
        assert {name: error for name, error in told.items() if not error < BACKWARD} == {}
