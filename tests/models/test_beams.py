"""Beam search against NumPy, with the rules of `transformers`, and against all texts."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import KVCache, generate

V, NEW, WIDTH = 5, 5, 8
PROMPT, LENGTHS = np.array([[3, 4, 2], [2, 0, 0], [4, 3, 0]]), np.array([3, 1, 2])
PENALTIES = (0.0, 0.5, 1.0, 2.0, -1.0)
TRACES: list[int] = []  # one for each trace of `step`
EMPTY = [KVCache.empty((3,), 8, 2, 4)]


def step(variables: Any, cache: Any, tokens: Any, positions: Any, lengths: Any = None) -> Any:
    """Compute the logits of a model of one attention layer."""
    TRACES.append(1)
    x = variables["table"][tokens]
    out, held = cache[0].extend(x, x, x, lengths=lengths)
    return (x + out).reshape(*tokens.shape, WIDTH) @ variables["head"], [held]


def drawn(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = {"table": rng.normal(size=(V, 2, 4)), "head": 0.4 * rng.normal(size=(WIDTH, V))}
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def log_p_of(variables: dict[str, np.ndarray], prompt: Sequence[int]) -> Callable[..., np.ndarray]:
    """Return the log-probabilities of the token after `prompt` and others, in float64."""
    table, head = (variables[name].astype(np.float64) for name in ("table", "head"))

    @functools.cache
    def log_p(tokens: tuple[int, ...]) -> np.ndarray:
        x = table[[*prompt, *tokens]]
        weights = np.exp(np.einsum("nh,tnh->tn", x[-1], x) / 2)
        out = np.einsum("tn,tnh->nh", weights / weights.sum(0), x)
        logits = (x[-1] + out).reshape(-1) @ head
        return logits - np.log(np.exp(logits).sum())

    return log_p


def searched(
    log_p: Callable[..., np.ndarray], beams: int, eos: Sequence[int], penalty: float, early: Any
) -> tuple[tuple[int, ...], float]:
    """Return the tokens and the score of a beam search, one candidate after another."""
    live: list[Any] = [((), 0.0)]
    ended: list[Any] = []
    for length in range(1, NEW + 1):
        found = [((*t, v), s + p) for t, s in live for v, p in enumerate(log_p(t))]
        found = sorted(found, key=lambda x: -x[1])[: max(2, 1 + len(eos)) * beams]
        stops = [length == NEW or tokens[-1] in eos for tokens, _ in found]
        live = [x for x, stop in zip(found, stops, strict=True) if not stop][:beams]
        first = zip(found[:beams], stops[:beams], strict=True)
        ended += [(tokens, score / length**penalty) for (tokens, score), stop in first if stop]
        ended = sorted(ended, key=lambda x: -x[1])[:beams]
        if not live or (early is True and len(ended) == beams):
            break
        longest = NEW if early == "never" and penalty > 0 else length
        if len(ended) == beams and live[0][1] / longest**penalty <= ended[-1][1]:
            break
    return ended[0]


def check(found: Any, expected: Sequence[Any], eos: Sequence[int]) -> None:
    for tokens, length, score, (text, total) in zip(*map(np.asarray, found), expected, strict=True):
        assert tokens.tolist() == [*text] + [(eos or (0,))[0]] * (NEW - len(text))
        assert (length, score) == (len(text), pytest.approx(total, abs=1e-5))


MANY = itertools.product([(2, (1,)), (3, (1,)), (4, (3,)), (3, (2, 0)), (3, ())], [False, True])
MORE = [(*case, early) for case, early in MANY] + [(2, (1, 4), "never"), (4, (3,), "never")]


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize(
    ("beams", "eos", "early"),
    [(2, (1,), "never"), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_beams_match_a_search_in_numpy(beams: int, eos: tuple[int, ...], early: Any) -> None:
    """Ragged prompts, several eos, and any length penalty, which needs no other program."""
    call = {"cache": EMPTY, "lengths": LENGTHS, "max_new_tokens": NEW, "eos": eos or None}
    ends, traces = set(), []
    for seed, penalty in itertools.product(range(3), PENALTIES):
        given = drawn(seed)
        found = generate(step, given, PROMPT, beams=beams, length_penalty=penalty,
                         early_stopping=early, **call)  # fmt: skip
        traces.append(len(TRACES))
        expected = [
            searched(log_p_of(given, row[:n]), beams, eos, penalty, early)
            for row, n in zip(PROMPT, LENGTHS, strict=True)
        ]
        check(found, expected, eos)
        ends |= {len(tokens) for tokens, _ in expected}
    assert len(ends) > 2 or not eos
    assert (np.diff(traces) == 0).all()


def markov(variables: Any, cache: Any, tokens: Any, positions: Any) -> Any:
    """Return the log-probabilities of the token after each token as logits."""
    key = jnp.zeros((*tokens.shape, 2, 4))
    return variables[tokens], [cache[0].append(key, key)]


@pytest.mark.sampled(0.08)
def test_ended_candidate_survives_better_live_ones() -> None:
    """An end of p = .30 is overtaken by .36 and .34 for one step. Then they have .08 at most."""
    p = np.full((V, V), 0.2)
    p[0], p[2], p[3] = (0, 0.3, 0.7, 0, 0), (0, 0, 0, 0.52, 0.48), (0.22, 0.18, 0.2, 0.2, 0.2)
    with np.errstate(divide="ignore"):
        log_p = np.log(p).astype(np.float32)
    prompt, eos = np.zeros((3, 1), int), (1,)
    call = {"cache": EMPTY, "max_new_tokens": NEW, "eos": eos, "beams": 2}
    found = generate(markov, log_p, prompt, **call)
    check(found, [((1,), np.log(0.30))] * 3, eos)
    call |= {"length_penalty": 2.0, "early_stopping": "never"}
    found = jax.jit(lambda v: generate(markov, v, prompt, **call))(log_p)
    total = np.log([0.7, 0.52, 0.22, 0.7, 0.52]).sum() / 25
    check(found, [((2, 3, 0, 2, 3), total)] * 3, eos)


def test_tokens_without_probability_and_nan_are_not_hidden() -> None:
    """A missing candidate never wins, and NaN of a live one shows in the score."""
    one = np.full((V, V), -np.inf, np.float32)
    one[np.arange(V), [2, 1, 3, 1, 1]] = 0  # 0 → 2 → 3 → 1
    prompt = np.zeros((3, 1), int)
    call = {"cache": EMPTY, "max_new_tokens": NEW, "eos": (1,), "beams": 2}
    check(generate(markov, one, prompt, **call), [((2, 3, 1), 0.0)] * 3, (1,))
    one[3] = -np.inf
    assert np.isnan(generate(markov, one, prompt, **call).scores).all()
