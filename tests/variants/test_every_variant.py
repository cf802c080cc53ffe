"""Steps, meshes, scanned stacks, generation and errors of all variants."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import (
    CacheConfig,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    LanguageModel,
    QKNorm,
    generate,
    masks,
    sharding,
    variants,
)  # fmt: skip
from flax_mha.models import TokenEmbedding
from flax_mha.positions import Rotary
from flax_mha.scores import Relative
from tests.support.arrays import random_variables
from tests.support.decoding import cache_of, decoded, greedy
from tests.support.layer_checks import drawn
from tests.support.meshes import EIGHT, on
from tests.support.oracle import error

N, K, H, D, T = 4, 2, 6, 16, 10
KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)
ROTARY = Rotary(100.0)
FIELDS: dict[str, dict[str, Any]] = {
    "ChosenBlocks": {"num_kv_heads": K, "rotary": ROTARY, "block": 4, "count": 2},
    "Differential": {"num_kv_heads": K, "rotary": ROTARY, "mask": masks.Causal()},
    "Forgetting": {"num_kv_heads": K},
    "MultiHeadLatent": {
        "v_head_dim": 5, "kv_rank": 7, "rope_dim": 4, "q_rank": 9, "rotary": ROTARY,
        "mask": masks.Causal(),
    },
    "TalkingHeads": {"num_kv_heads": K, "mask": masks.Causal()},
}  # fmt: skip
# Each cache of T tokens, and the bound on the rounding of its steps.
CACHES: list[tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...], float]] = [
    ("ChosenBlocks", {}, (K, T, H), (K, T, H), 1e-5),
    ("Differential", {}, (2 * K, T, H), (2 * K, T, 2 * H), 1e-5),
    ("Forgetting", {}, (K, T, H + 5 * N // K), (K, T, H), 2e-6),
    ("MultiHeadLatent", {}, (1, T, 4), (1, T, 7), 1e-5),  # Each latent once.
    *[("TalkingHeads", {"cache": CacheConfig(dtype=dtype)}, (1, T, K * H), (1, T, K * H), bound)
      for dtype, bound in (("float32", 5e-6), ("bfloat16", 0.02), ("int8", 0.05))],
]  # fmt: skip


def layer(name: str, **fields: Any) -> Any:
    cls = getattr(variants, f"{name}Attention")
    return cls(N, **{"head_dim": H} | FIELDS[name] | fields)


@pytest.mark.sampled(0.042)
@pytest.mark.parametrize("steps", [(1,) * T, (4, 6), (3, 1, 6)], ids=str)
@pytest.mark.parametrize(("name", "fields", "key", "value", "bound"), CACHES)
def test_steps_match_the_full_forward(
    name: str, fields: Any, key: Any, value: Any, bound: float, steps: tuple[int, ...]
) -> None:
    plain = layer(name, **fields)
    cached, params = plain.clone(decode=True), drawn(plain, X)
    cache = jax.eval_shape(cached.init, KEY, X)["cache"]["kv"]
    assert (cache.key.shape, cache.value.shape) == ((2, *key), (2, *value))
    whole = jax.jit(plain.apply)(params, X)
    assert error(decoded(cached, params, X, steps), np.asarray(whole)) < bound


@pytest.mark.sampled(0.03)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("rules", [sharding.RULES, EIGHT], ids=["heads", "length"])
@pytest.mark.parametrize("name", FIELDS)
def test_meshes_match_one_device(name: str, rules: Any, kind: str) -> None:
    x = np.random.default_rng(4).normal(size=(2, 16, D)).astype(np.float32)
    heads = {} if name == "MultiHeadLatent" else {"num_kv_heads": 4}
    module, decodes = layer(name, **heads), name not in list(FIELDS)[:2]
    params, cached = random_variables(module, x), module.clone(decode=True)
    cache = cache_of(cached, x) if decodes else None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(module.apply(params, x)))

    def run(params: Any, cache: Any, x: jax.Array) -> Any:
        state = {**params, "cache": cache}
        step = cached.apply(state, x, mutable="cache")[0] if decodes else None
        return jax.grad(loss)(params, x), step

    expected = jax.jit(run)(params, cache, x)
    with on(kind, rules):
        actual = jax.jit(run)(params, cache, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected
    )


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("name", FIELDS)
def test_tokens_of_other_documents_and_later_tokens_change_nothing(
    name: str, is_cached: bool
) -> None:
    """The choice of blocks does not read them either."""
    module = layer(name, mask=masks.Causal() & masks.Documents(np.array([5, 3])))
    params, bad = drawn(module, X), X.copy()
    bad[:, [2, 9]] = 9
    run = jax.jit(module.apply)
    out = run(params, X)
    if is_cached:
        found = decoded(module.clone(decode=True), params, bad, (4, 6))
    else:
        found = run(params, bad)
    others = [i for i in range(T) if i not in (2, 3, 4, 9)]
    assert error(found[:, others], out[:, others]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_scanned_stacks_match_unrolled_ones(name: str) -> None:
    """With remat, ragged rows and a mask of heads."""
    call = {"lengths": np.array([T, 4]), "head_mask": np.array([1.0, 0.0, 0.5, 1.0], np.float32)}
    loop, scan = (
        Encoder(2, EncoderBlock(layer(name), 24, remat=scan), scan=scan) for scan in (False, True)
    )
    params = random_variables(loop, X)
    rest = params["params"].copy()
    layers = [rest.pop(f"layers_{i}") for i in range(2)]
    together = rest | {"layers": jax.tree.map(lambda *x: np.stack(x), *layers)}
    whole = jax.jit(loop.apply)
    scanned = jax.jit(scan.apply)({"params": together}, X, **call)
    assert error(scanned, np.asarray(whole(params, X, **call))) < 1e-5
    bad = np.where(np.arange(T)[:, None] < 4, X, np.nan)
    assert np.isfinite(whole(params, bad, lengths=np.array([4, 4]))).all()


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", ["Forgetting", "MultiHeadLatent", "TalkingHeads"])
def test_models_generate_like_full_forwards(name: str, scan: bool) -> None:
    block = DecoderBlock(layer(name, mask=None), 24, remat=scan, norm="rmsnorm", gated=True)
    model = LanguageModel(TokenEmbedding(40, D), Decoder(2, block, scan=scan))
    tokens = np.random.default_rng(2).integers(0, 40, (2, 4))
    params = random_variables(model, tokens)
    actual = generate(model, params, tokens, max_new_tokens=4).tokens
    expected = greedy(functools.partial(model.apply, params), tokens, 4)
    np.testing.assert_array_equal(actual, expected)


RELATIVE = {"scores": (Relative(max_distance=2),)}
MISTAKES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("ChosenBlocks", {"block": 0}, {}, "block must be at least 1"),
    ("ChosenBlocks", {"count": 1.5}, {}, "count must be an int"),
    ("ChosenBlocks", {"query_block": 7}, {}, r"at least 3, the blocks of 4 keys that 7 queries"),
    ("ChosenBlocks", {"attention_fn": nn.dot_product_attention}, {}, "has no attention_fn"),
    ("ChosenBlocks", {}, {"order": np.arange(T)}, "order cannot be used with chosen blocks"),
    ("ChosenBlocks", {"decode": True, "query_block": 2}, {}, "chooses for each token, got query_b"),
    ("ChosenBlocks", {"decode": True, "cache": CacheConfig(slots=8), "mask": masks.Window(3, 0)},
     {}, "ring"),
    ("Differential", {"sinks": True}, {}, "has no sinks"),
    ("Differential", {"v_head_dim": 3}, {}, "has no v_head_dim"),
    ("Differential", {"scale": "learned"}, {}, "scale must be a number"),
    ("Forgetting", {"attention_fn": nn.dot_product_attention}, {}, "has no attention_fn"),
    ("Forgetting", RELATIVE, {}, "no scores of query .* got Relative"),
    ("Forgetting", {"decode": True, "cache": CacheConfig(dtype="int8")}, {}, "all digits .* int8"),
    ("Forgetting", {"decode": True, "dtype": jnp.float16}, {}, "all digits .* got float16"),
    ("MultiHeadLatent", {"rotary": None}, {}, "needs rotary, got None"),
    ("MultiHeadLatent", {"num_kv_heads": 2}, {}, "has no num_kv_heads, got 2"),
    ("MultiHeadLatent", {"qk_norm": QKNorm()}, {}, "has no qk_norm"),
    ("MultiHeadLatent", {"gate": "head"}, {}, "has no gate"),
    ("MultiHeadLatent", {"scale": "learned"}, {}, "scale must be a number"),
    ("MultiHeadLatent", RELATIVE, {}, "no scores of query .* got Relative"),
    ("MultiHeadLatent", {"kv_rank": 0}, {}, "kv_rank must be at least 1"),
    ("MultiHeadLatent", {"qkv_features": 7}, {}, r"must be num_heads \* head_dim = 4 \* 6"),
    ("MultiHeadLatent", {"head_dim": 0}, {}, "head_dim must be at least 1"),
    ("TalkingHeads", {"attention_fn": nn.dot_product_attention}, {}, "has no attention_fn"),
    ("TalkingHeads", RELATIVE, {}, "no scores of query .* got Relative"),
    ("TalkingHeads", {"scale": "learned"}, {}, "scale must be a number"),
    *[(name, {}, {"inputs_k": X[:, :3]}, "is self-attention") for name in list(FIELDS)[:4]],
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "call", "words"), MISTAKES)
def test_mistakes_raise(name: str, fields: Any, call: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        jax.eval_shape(functools.partial(layer(name, **fields).init, KEY, X, **call))
