"""Decoders, the language model and the translator against their formulas in NumPy float64."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import DecoderBlock, EncoderBlock, MultiHeadAttention, masks
from flax_mha.models import Decoder, Encoder, LanguageModel, TokenEmbedding, Translator
from flax_mha.positions import PositionEmbedding
from tests.support import oracle
from tests.support.arrays import random_variables
from tests.support.oracle import error, float64

KEY = jax.random.key(0)
OUTPUT = 1e-5  # see test_blocks
B, T, S, D, V = 2, 4, 5, 8, 7
LENGTHS = np.array([3, 5])
SEEN = (np.arange(S) < LENGTHS[:, None])[:, None, None]
CAUSAL = np.tril(np.ones((T, T), bool))
RNG = np.random.default_rng(1)
X, MEMORY = (RNG.normal(size=(B, n, D)).astype(np.float32) for n in (T, S))
SOURCE, TARGET = RNG.integers(0, V, (B, S)), RNG.integers(0, V, (B, T))


def block(cross: bool = True, **fields: Any) -> DecoderBlock:
    layer = MultiHeadAttention(2, num_kv_heads=1)
    return DecoderBlock(layer, 16, cross_attention=layer.copy() if cross else None, **fields)


def decoder_block(
    params: Any, x: Any, memory: Any, norm: str = "layernorm", pre_norm: bool = True
) -> np.ndarray:
    """Compute the formula with the padding of the encoder output hidden."""
    branches = {
        "attention": lambda x: oracle.multi_head(params["attention"], x, allowed=CAUSAL)[0],
        "cross_attention": lambda x: oracle.multi_head(
            params["cross_attention"], x, float64(memory), allowed=SEEN
        )[0],
        "mlp": lambda x: oracle.mlp(params["mlp"], x),
    }
    x = float64(x)
    for name, branch in branches.items():
        normed = lambda x, name=name: oracle.NORMS[norm](params[f"{name}_norm"], x)  # noqa: E731
        x = x + branch(normed(x)) if pre_norm else normed(x + branch(x))
    return x


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize(
    ("scan", "norm", "pre_norm"), [(False, "rmsnorm", False), (True, "layernorm", True)]
)
def test_decoder_matches_formula(scan: bool, norm: str, pre_norm: bool) -> None:
    """The gradients of later tokens and padding are exactly 0."""
    inner = block(norm=norm, pre_norm=pre_norm)
    loop, module = Decoder(2, inner), Decoder(2, inner.copy(remat=scan), scan=scan)
    params = random_variables(loop, X, MEMORY)["params"]
    given, layers = params, [params[f"layers_{i}"] for i in range(2)]
    if scan:
        stacked = jax.tree.map(lambda *x: np.stack(x), *layers)
        given = {"layers": stacked, "norm": params["norm"]}
    at, weights = 2, RNG.normal(size=(B, D)).astype(np.float32)

    @jax.jit
    def features(x: Any, memory: Any) -> jax.Array:
        def loss(x: Any, memory: Any) -> Any:
            out = module.apply({"params": given}, x, memory, memory_lengths=LENGTHS)
            return jnp.sum(out[:, at] * weights), out

        return jax.grad(loss, (0, 1), has_aux=True)(x, memory)

    (dx, dm), out = features(X, MEMORY)
    np.testing.assert_array_equal((dx != 0).any(-1), np.tile(np.arange(T) <= at, (B, 1)))
    np.testing.assert_array_equal((dm != 0).any(-1), SEEN[:, 0, 0])
    expected = X
    for layer in layers:
        expected = decoder_block(layer, expected, MEMORY, norm, pre_norm)
    expected = oracle.NORMS[norm](params["norm"], expected) if pre_norm else expected
    assert error(out, expected) < OUTPUT


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("tied", [True, False])
def test_language_model_matches_formula(tied: bool) -> None:
    table = PositionEmbedding("sinusoidal")
    decoder = Decoder(2, block(cross=False))
    model = LanguageModel(TokenEmbedding(V, D), decoder, tied, table)
    params = random_variables(model, TARGET)
    p = float64(params["params"])
    embedding = p["embedding"]["table"]["embedding"]
    x = embedding[TARGET] + oracle.sinusoidal(np.arange(T), D)
    for i in range(2):
        x = oracle.encoder_block(p["decoder"][f"layers_{i}"], x, allowed=CAUSAL)
    x = oracle.layer_norm(p["decoder"]["norm"], x)
    expected = x @ (embedding if tied else p["head"]["table"]["embedding"]).T
    logits = jax.jit(model.apply)(params, TARGET)
    assert (logits.dtype, error(logits, expected) < OUTPUT) == (jnp.float32, True)
    at = np.array([1, 3])
    last = jax.jit(model.apply)(params, TARGET, at=at)
    assert error(last[:, 0], expected[np.arange(B), at]) < OUTPUT


@pytest.mark.sampled(0.12)
def test_translator_matches_formula() -> None:
    """The source's padding has no influence at all."""
    encoder = Encoder(1, EncoderBlock(MultiHeadAttention(2), 16))
    decoder = LanguageModel(TokenEmbedding(V, D), Decoder(1, block()))
    model = Translator(encoder, decoder)
    params = random_variables(model, SOURCE, TARGET)
    p = float64(params["params"])
    target = p["decoder"]["embedding"]["table"]["embedding"]
    memory = oracle.encoder_block(p["encoder"]["layers_0"], target[SOURCE], allowed=SEEN)
    memory = oracle.layer_norm(p["encoder"]["norm"], memory)
    x = decoder_block(p["decoder"]["decoder"]["layers_0"], target[TARGET], memory)
    expected = oracle.layer_norm(p["decoder"]["decoder"]["norm"], x) @ target.T
    apply = jax.jit(lambda *tokens: model.apply(params, *tokens, source_lengths=LENGTHS))
    logits = apply(SOURCE, TARGET)
    assert error(logits, expected) < OUTPUT
    padded = np.where(np.arange(S) < LENGTHS[:, None], SOURCE, V - 1)
    np.testing.assert_array_equal(apply(padded, TARGET), logits)


def test_traced_values_out_of_range_give_nan() -> None:
    """Token ids, positions and `at`. The other rows do not change."""
    table = PositionEmbedding(max_length=T)
    layers = Decoder(1, DecoderBlock(MultiHeadAttention(2), 8))
    model = LanguageModel(TokenEmbedding(V, D), layers, position_embedding=table)
    params = random_variables(model, TARGET)
    positions = np.broadcast_to(np.arange(T), (B, T))

    @jax.jit
    def run(tokens: Any, positions: Any, at: Any) -> Any:
        return model.apply(params, tokens, positions=positions, at=at)

    wanted = run(TARGET, positions, np.array([1, 3]))
    for wrong in (-1, 99):
        for call in (
            (np.where(positions * [[1], [0]] == 1, wrong, TARGET), positions, np.array([1, 3])),
            (TARGET, np.where(positions * [[1], [0]] == 1, wrong, positions), np.array([1, 3])),
            (TARGET, positions, np.array([wrong, 3])),
        ):
            out = run(*call)
            assert np.isnan(out[0]).all()
            np.testing.assert_array_equal(out[1], wanted[1])


class Plain(DecoderBlock):
    """A user's block that takes neither an encoder output nor unused arguments."""

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:  # type: ignore[override]
        return x + self.attention(x, mask=masks.Causal(), deterministic=deterministic)


@pytest.mark.parametrize("scan", [False, True])
def test_user_defined_block_gets_the_call_arguments(scan: bool) -> None:
    stack = Decoder(2, Plain(MultiHeadAttention(2), 16, pre_norm=False), scan=scan)
    params = random_variables(stack, X)["params"]
    out = jax.jit(partial(stack.apply, deterministic=True))({"params": params}, X)
    expected = float64(X)
    for i in range(2):
        own = jax.tree.map(lambda p, i=i: p[i], params["layers"]) if scan else params[f"layers_{i}"]
        expected = expected + oracle.multi_head(own["attention"], expected, allowed=CAUSAL)[0]
    assert error(out, expected) < OUTPUT
    with pytest.raises(TypeError, match="unexpected keyword argument 'memory_lengths'"):
        jax.eval_shape(stack.init, KEY, X, memory_lengths=LENGTHS)
