"""Muon treats each head as one matrix, so that updates need no other device."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

import flax_mha
from flax_mha import (
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    Experts,
    LanguageModel,
    MultiHeadAttention,
    muon_dimensions,
)
from flax_mha.models import TokenEmbedding
from flax_mha.positions import Rotary
from flax_mha.variants import MultiHeadLatentAttention
from tests.support.meshes import KINDS, collectives, described, on
from tests.support.oracle import error, float64, random_like

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
TO, FROM = MuonDimensionNumbers(-3, -1), MuonDimensionNumbers(-2, -1)


@pytest.fixture(autouse=True)
def lenient() -> Iterator[None]:
    """Allow implicit promotion, which Optax relies on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def matrices(params: Any) -> dict[str, Any]:
    """Return the dimensions by path, without None."""
    leaves = jax.tree_util.tree_leaves_with_path(
        muon_dimensions(params), is_leaf=lambda x: isinstance(x, MuonDimensionNumbers)
    )
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def params_of(module: Any, x: Any = X) -> Any:
    return random_like(jax.eval_shape(module.init, KEY, x)["params"])


def orthogonalized(grad: np.ndarray) -> np.ndarray:
    """Compute a step of Muon from a first gradient [rows, columns], by its definition."""
    x = grad / np.linalg.norm(grad)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return -np.sqrt(max(1, grad.shape[1] / grad.shape[0])) * x


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("scan", [False, True])
def test_muon_orthogonalizes_each_head(scan: bool) -> None:
    layer = MultiHeadAttention(4, num_kv_heads=2, gate="feature")
    grads = params_of(Encoder(2, EncoderBlock(layer, 24), scan=scan))
    optimizer = muon(1.0, muon_weight_dimension_numbers=muon_dimensions)
    steps, _ = jax.jit(optimizer.update)(grads, optimizer.init(grads), grads)
    block, step = (tree["layers" if scan else "layers_1"] for tree in (grads, steps))
    for name in ("query", "key", "value", "output_gate", "out"):
        grad, found = (float64(tree["attention"][name]["kernel"]) for tree in (block, step))
        grad, found = (x[1] if scan else x for x in (grad, found))
        for n in range(2 if name in ("key", "value") else 4):
            head = n if name == "out" else (slice(None), n)
            assert error(found[head], orthogonalized(grad[head])) < 1e-4, name
    grad, found = (float64(tree["mlp"]["up"]["kernel"]) for tree in (block, step))
    grad, found = (x[1] if scan else x for x in (grad, found))
    assert error(found, orthogonalized(grad)) < 1e-4


def test_parameters_without_matrix_go_to_adam() -> None:
    """Biases, embeddings, norms and scalar gates. Each expert has its own matrix."""
    latent = MultiHeadLatentAttention(
        2, rotary=Rotary(), head_dim=8, kv_rank=6, rope_dim=4, q_rank=8
    )
    block = DecoderBlock(MultiHeadAttention(2, gate="head"), mlp=Experts(8, 3, 2))
    model = LanguageModel(
        TokenEmbedding(11, 16), Decoder(2, (block, DecoderBlock(latent, 8))), tied=False
    )
    params = jax.eval_shape(model.init, KEY, np.ones((1, 4), int))["params"]
    # Other parameters follow Optax's default.
    convolution = {"kernel": np.ones((3, 3, 2, 4))}
    found = matrices({**params, "dense": {"kernel": np.ones((3, 4))}, "conv": convolution})
    first, second = ("decoder/layers_0/", "decoder/layers_1/")
    assert found == {
        **{f"{first}attention/{name}/kernel": TO for name in ("query", "key", "value")},
        **{f"{second}attention/{name}/kernel": TO for name in ("query", "key", "value")},
        **{f"{second}attention/{name}_down/kernel": FROM for name in ("query", "kv")},
        **{f"{at}attention/out/kernel": FROM for at in (first, second)},
        **{f"{second}mlp/{name}/kernel": FROM for name in ("up", "down")},
        **{f"{first}mlp/{name}_kernel": FROM for name in ("up", "gate", "down")},
        f"{first}mlp/router/kernel": FROM,
        "dense/kernel": FROM,
    }


def test_muon_dimensions_of_nnx_layer() -> None:
    layer = flax_mha.nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0))
    names = {"query": TO, "key": TO, "value": TO, "out": FROM}
    found = matrices(nnx.state(layer, nnx.Param))
    assert found == {f"{name}/kernel/value": x for name, x in names.items()}


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("kind", KINDS)
def test_muon_of_sharded_heads_needs_no_collectives(optimized: None, kind: str) -> None:
    layer = MultiHeadAttention(8, num_kv_heads=8)
    optimizer = muon(1.0, muon_weight_dimension_numbers=muon_dimensions)
    with on(kind, shape=(1, 8)):
        params = described(layer, X)["params"]
        state = jax.eval_shape(optimizer.init, params)
        update = jax.jit(optimizer.update).lower(params, state, params).compile()
    assert collectives(update.as_text()) == []
