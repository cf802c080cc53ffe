"""Generation against searches without a cache, each row alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.plan.collectives import read
from flax_mha import (
    CacheConfig,
    DecoderBlock,
    EncoderBlock,
    MultiHeadAttention,
    Platform,
    kernels,
    sampling,
    sharding,
)  # fmt: skip
from flax_mha.masks import Window
from flax_mha.models import Decoder, Encoder, LanguageModel, TokenEmbedding, Translator
from flax_mha.models.generation import generate
from flax_mha.positions import PositionEmbedding, Rotary
from tests.models.test_beams import LENGTHS, NEW, PROMPT, searched
from tests.support.meshes import KINDS, changed, on
from tests.support.oracle import random_like

KEY = jax.random.key(0, impl="unsafe_rbg")
V, D, EOS, START = 6, 8, 1, 2


def language_model(scan: bool = False, **fields: Any) -> LanguageModel:
    rotary = None if fields else Rotary()
    attention = MultiHeadAttention(2, num_kv_heads=1, rotary=rotary, kernel="reference")
    block = DecoderBlock(attention, 16, norm="rmsnorm")
    return LanguageModel(TokenEmbedding(V, D), Decoder(2, block, scan=scan), **fields)


def translator() -> Translator:
    self, cross = (MultiHeadAttention(2, kernel="reference") for _ in range(2))
    block = DecoderBlock(self, 16, "rmsnorm", cross_attention=cross)
    table = PositionEmbedding("learned", max_length=8)
    decoder = LanguageModel(
        TokenEmbedding(V, D), Decoder(2, block, scan=True), tied=False, position_embedding=table
    )
    return Translator(Encoder(1, EncoderBlock(self, 16)), decoder)


# A layer with a ring, and one that sees all tokens.
BLOCKS = [
    DecoderBlock(MultiHeadAttention(2, num_kv_heads=1, rotary=Rotary(), **fields), 16)
    for fields in ({"mask": Window(2, 0), "cache": CacheConfig(slots=4)}, {"normalize_qk": True})
]
MODELS = {
    "rotary": language_model(),
    "scanned, learned positions": language_model(
        scan=True, tied=False, position_embedding=PositionEmbedding("learned", max_length=8)
    ),
    "translator": translator(),
    "alternating": LanguageModel(TokenEmbedding(V, D), Decoder(5, BLOCKS, scan=True), tied=False),
    # Two layers share their keys and values, two use them.
    "shared": LanguageModel(TokenEmbedding(V, D), Decoder(4, BLOCKS, kv_from=(None, None, 0, 1))),
}
# Seeds of parameters that continue the prompts differently.
SEEDS = {
    "rotary": 8, "scanned, learned positions": 4, "translator": 17, "alternating": 16, "shared": 1,
}  # fmt: skip


@functools.cache
def made(name: str) -> tuple[Any, Any, dict[str, int]]:
    """Return a model, its parameters, and the extra arguments of generate."""
    model = MODELS[name]
    translates = isinstance(model, Translator)
    shapes = jax.eval_shape(model.init, KEY, *[PROMPT] * (1 + translates))
    variables = jax.tree.map(lambda x: 2 * x, random_like(shapes, SEEDS[name]))
    return model, variables, {"start": START} if translates else {}


@functools.cache
def _scorer(name: str) -> Any:
    model, variables, start = made(name)
    if start:
        return jax.jit(lambda s, n, t: model.apply(variables, s, t, source_lengths=n))
    return jax.jit(lambda tokens: model.apply(variables, tokens))


def log_p_of(name: str, prompt: np.ndarray) -> Any:
    """Return the log-probabilities of the token after `prompt` and others, without a cache.

    Padding at the end is invisible to earlier tokens.
    """
    n = len(prompt)

    @functools.cache
    def log_p(tokens: tuple[int, ...]) -> np.ndarray:
        if made(name)[2]:
            source, target = np.zeros((1, 3), int), np.zeros((1, NEW), int)
            source[0, :n], target[0, : 1 + len(tokens)] = prompt, [START, *tokens]
            logits = _scorer(name)(source, np.array([n]), target)[0, len(tokens)]
        else:
            text = np.zeros((1, 3 + NEW), int)
            text[0, : n + len(tokens)] = [*prompt, *tokens]
            logits = _scorer(name)(text)[0, n + len(tokens) - 1]
        wide = np.asarray(logits, np.float64)
        return wide - np.log(np.exp(wide).sum())

    return log_p


def rows(found: Any) -> list[tuple[list[int], float]]:
    assert all((row[n:] == EOS).all() for row, n in zip(found.tokens, found.lengths, strict=True))
    return [
        (row[:n].tolist(), float(score))
        for row, n, score in zip(*map(np.asarray, found), strict=True)
    ]


def same(found: Any, expected: Any) -> None:
    for (tokens, score), (wanted, total) in zip(found, expected, strict=True):
        assert tokens == wanted
        assert score == pytest.approx(total, abs=1e-4)


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_search_with_cache_matches_search_without(name: str, beams: int) -> None:
    """Ragged prompts generate as if alone, and end at any eos. The callback sees each step."""
    model, variables, start = made(name)
    ends = (EOS, 0)
    seen: list[tuple[int, np.ndarray]] = []
    callback = {"callback": lambda *step: seen.append(step)} if beams == 1 else {"beams": beams}
    call = {"max_new_tokens": NEW, "lengths": LENGTHS, "eos": ends, **start, **callback}
    found = generate(model, variables, PROMPT, **call)
    expected = [
        searched(log_p_of(name, row[:n]), beams, ends, 0.0, False)
        for row, n in zip(PROMPT, LENGTHS, strict=True)
    ]
    same(rows(found), [([*tokens], score) for tokens, score in expected])
    assert beams > 1 or len({len(tokens) for tokens, _ in expected}) > 1
    if beams == 1:
        assert [step for step, _ in seen] == list(range(max(found.lengths)))
        streamed = np.stack([tokens for _, tokens in seen], axis=1)
        np.testing.assert_array_equal(streamed, found.tokens[:, : len(seen)])


@pytest.mark.sampled(0.08)
def test_traced_ids_out_of_range_give_nan_scores() -> None:
    """Only within a prompt's length. Beyond it any id is allowed."""
    model, variables, _ = made("rotary")

    @jax.jit
    def run(prompt: jax.Array) -> Any:
        call = {"max_new_tokens": NEW, "lengths": LENGTHS, "eos": EOS}
        return generate(model, variables, prompt, **call)

    expected = run(PROMPT)
    same(rows(run(PROMPT + np.array([[0, 0, 0], [0, -9, V], [0, 0, -1]]))), rows(expected))
    for wrong in (-1, V):
        actual = run(np.where(PROMPT == 2, wrong, PROMPT))
        np.testing.assert_array_equal(np.isnan(actual.scores), [True, True, False])


@pytest.mark.slow
@given(
    st.lists(st.integers(-20, 20) | st.just(-np.inf), min_size=1, max_size=9), st.integers(1, 9),
    st.floats(0.01, 1.0), st.integers(0, 2000), st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["cpu", "gpu"]),
)  # fmt: skip
@example([0, 20], 2, 1.0, 2000, "float32", "cpu")
@example([0, 4], 1, 0.999, 2000, "bfloat16", "gpu")
def test_top_k_and_top_p_keep_the_right_tokens(
    logits: list[int], k: int, p: float, more: int, dtype: str, platform: str
) -> None:
    """Against NumPy. Of equal logits, the smaller tokens come first."""
    with kernels.use(platform=Platform(platform)):
        check_limits(logits, k, p, more, dtype)


def check_limits(logits: list[int], k: int, p: float, more: int, dtype: str) -> None:
    x = np.pad(np.asarray(logits, np.float32) / 4, (0, more), constant_values=-2)
    k = min(k + more, len(x))
    order = np.argsort(-x, kind="stable")
    kept = np.full_like(x, -np.inf)
    kept[order[:k]] = x[order[:k]]
    given = jnp.asarray(x, dtype)
    np.testing.assert_array_equal(sampling.top_k(given, k), kept)
    # Constrained decoding may leave no token.
    if max(x) == -np.inf:
        return

    likely = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum())[order]
    before = np.cumsum(likely) - likely
    if np.abs(before - p).min() > 1e-5:  # otherwise float32 may round either way
        count = max(1, int((before < p).sum()))
        kept = np.full_like(x, -np.inf)
        kept[order[:count]] = x[order[:count]]
        np.testing.assert_array_equal(sampling.top_p(given, p), kept)
    np.testing.assert_array_equal(sampling.top_p(given, 1.0), x)


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "limit",
    [functools.partial(sampling.top_k, k=9), functools.partial(sampling.top_p, p=0.6)],
    ids=["k", "p"],
)
def test_sharded_logits_are_gathered_before_a_search(
    limit: Any, kind: str, optimized: None
) -> None:
    """And the result is sharded as they are."""
    x = np.random.default_rng(0).integers(-4, 4, (4, 64)).astype(np.float32)
    wanted = limit(x)
    with on(kind) as mesh:
        logits = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
        compiled = jax.jit(limit).lower(logits).compile()
        found = compiled(logits)
    np.testing.assert_array_equal(found, wanted)
    assert found.sharding == logits.sharding
    # XLA:CPU gathers the rows of a `top_k` too.
    assert {sent.times for sent in read(compiled.as_text(), devices=8)} == {1}


@pytest.mark.slow
def test_rare_tokens_are_drawn() -> None:
    """50,000 tokens of probability 1e-7 together have 20 draws of 4,000."""
    n, p = 50_000, 1e-7
    logits = jnp.full((200, n + 1), np.log(p)).at[:, 0].set(np.log1p(-n * p))
    draw = jax.jit(sampling.Sampling.checked(1.0, None, None).choose)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 20)
    assert 10 <= sum(int((draw(key, logits) > 0).sum()) for key in keys) <= 32


@pytest.mark.slow
def test_samples_follow_the_distribution() -> None:
    """After temperature, top_k and top_p. A sample is a function of its key."""
    logits = jnp.asarray([2.0, 1.0, 0.0, -1.0, -2.0])
    many = jnp.broadcast_to(logits, (20_000, 5))
    rule = sampling.Sampling.checked(temperature=2.0, top_k=4, top_p=0.9)
    tokens = rule.choose(KEY, many)
    p = np.exp(np.array([1.0, 0.5, 0.0, -0.5]))
    p = np.where(np.cumsum(p / p.sum()) - p / p.sum() < 0.9, p, 0)
    share = np.bincount(tokens, minlength=5) / len(many)
    np.testing.assert_allclose(share, [*p / p.sum(), 0], atol=0.02)

    model, variables, _ = made("rotary")
    call = {"max_new_tokens": NEW, "temperature": 9.0}
    one, same, other = (
        generate(model, variables, PROMPT[:1], rng=jax.random.key(seed), **call).tokens
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "beams", "kind", "length"),
    [
        ("rotary", 1, "Auto", None),
        ("translator", 3, "Explicit", None),
        # Three prompt tokens, then one, under rules that shard sequences in training.
        ("rotary", 2, "Explicit", "model"),
    ],
)
def test_generate_on_mesh_matches_one_device(
    name: str, beams: int, kind: str, length: str | None
) -> None:
    model, variables, start = made(name)
    prompt, lengths = np.tile(PROMPT[:2], (2, 1)), np.tile(LENGTHS[:2], 2)
    call = {"max_new_tokens": NEW, "eos": EOS, "beams": beams, **start}
    alone = generate(model, variables, prompt, lengths=lengths, **call)
    by_tokens = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"))
    by_tokens |= {"length": length, "norm_length": length}
    with on(kind, changed(**by_tokens) if length else sharding.RULES, (2, 2)):
        # In training two tokens can be sharded over two devices.
        example = prompt[:, :2]
        layout = sharding.of(lambda: model.init(KEY, *[example] * (1 + len(start))))
        found = generate(model, jax.device_put(variables, layout), prompt, lengths=lengths, **call)
    same(rows(found), rows(alone))
