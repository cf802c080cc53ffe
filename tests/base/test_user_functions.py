"""User-defined masks and scores: the results that they may return and the values they may hold."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention, explain
from flax_mha.masks import Causal, Mask, PerHead, Predicate
from flax_mha.scores import Score, ScoreMod

Q = np.ones((2, 4, 3, 8), np.float32)


def forgetful(*_: Any) -> None:
    """Return nothing, like a function whose author forgot to return."""


class Bad(Mask):
    given: Any

    def allowed(self, at: Any) -> Any:
        return self.given


def predicate(fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    return {"mask": Predicate(fn, args)}


def score(fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    return {"scores": (Score(fn, args),)}


WRONG = {
    "mask: no return": (predicate(forgetful), TypeError,
                        r"Predicate must return bools.*got None; return a comparison"),
    "mask: ints": (predicate(lambda b, n, i, j: j - i), TypeError, r"got int32 .*; return"),
    "mask: shape": (predicate(lambda b, n, i, j: jnp.ones(5, bool)), ValueError,
                    r"Predicate.s result must broadcast to.*\(2, 3, 4, 4\), got \(5,\); compute"),
    "bad: none, joined": ({"mask": Bad(None) & Causal()}, TypeError, r"Bad must return.*got None"),
    "bad: none, of a head": ({"mask": PerHead([Bad(None)] * 3)}, TypeError, r"Bad must return"),
    "score: no return": (score(forgetful), TypeError, r"Score must return .*got None; "),
    "score: ints": (score(lambda s, b, n, i, j: i - j), TypeError, r"got int32 .*; return it"),
    "score: shape": (score(lambda s, *_: s[..., :2]), ValueError,
                     r"Score.s result must broadcast to the score.*got \(2, 3, 4, 2\); compute"),
    "PerHead of none": ({"mask": PerHead(())}, ValueError, r"each of the 3 query heads, got 0; "),
    "PerHead of names": ({"mask": PerHead(["causal"] * 3)}, TypeError, r"array, got 'causal'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_of_user_functions_are_refused(name: str) -> None:
    call, error, message = WRONG[name]
    for function in (dot_product_attention, explain):
        with pytest.raises(error, match=f"(?s){message}") as raised:
            function(Q, Q, Q, **call)
        assert raised.type is error


@pytest.mark.sampled(0.08)
def test_user_functions_may_return_scalars_and_other_dtypes() -> None:
    """A score may return one number for all pairs in another dtype, a mask one bool for all."""
    given = Score(lambda s, b, n, i, j: jnp.where(j > 1, 1.0, 2.0).astype(jnp.bfloat16))
    out = dot_product_attention(Q, Q, Q, scores=(given,), mask=Predicate(lambda *_: True))
    np.testing.assert_allclose(out, Q)


def closing_over(x: jax.Array, q: jax.Array, kind: str) -> jax.Array:
    """Return the sum of an attention call with a function that closes over x."""
    if kind == "mask":
        call = {"mask": Predicate(lambda b, n, i, j: j <= x.astype(int))}
    else:
        call = {"scores": (Score(lambda s, b, n, i, j: s * x),)}
    return dot_product_attention(q, q, q, **call).sum()


@pytest.mark.parametrize(("kind", "T"), [("mask", 600), ("score", 4)])
@pytest.mark.parametrize("under", ["jit", "grad", "vmap", "scan"])
def test_closures_over_traced_arrays_are_refused(under: str, T: int, kind: str) -> None:
    """At every length and with every kernel: the gradients would be lost, or JAX would fail."""
    q = np.ones((1, T, 1, 2), np.float32)

    def call(x: jax.Array) -> jax.Array:
        return closing_over(x, q, kind)

    def scanned(x: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, x: (carry, call(x)), 0, x[None])

    calls = {"jit": jax.jit(call), "grad": jax.grad(call), "scan": scanned}
    calls["vmap"] = lambda x: jax.vmap(call)(x[None])
    with pytest.raises(TypeError, match=r"closes over \w+ \(\); write Score\(fn, \(x,\)\)"):
        jax.eval_shape(calls[under], 2.0)


def test_closures_over_concrete_arrays_are_accepted() -> None:
    limit = np.int32(1)
    mask = Predicate(lambda b, n, i, j: j <= limit)
    attend = functools.partial(dot_product_attention, mask=mask, return_weights=True)
    _, weights = jax.jit(attend)(Q, Q, Q)
    np.testing.assert_allclose(weights[0, 0, 0], [0.5, 0.5, 0, 0], rtol=1e-6)


@pytest.mark.sampled(0.096)
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_float_args_work_in_both_passes(rng: np.random.Generator, kernel: str) -> None:
    """A float among `args` works like an array, in the backward pass too."""
    q = rng.normal(size=(1, 6, 1, 2)).astype(np.float32)

    def distant(s: Any, b: Any, n: Any, i: Any, j: Any, slope: Any, far: Any) -> Any:
        return s - slope * abs(i - j + far).astype(s.dtype)

    @jax.jit
    @jax.grad
    def gradient(q: jax.Array, args: Any) -> jax.Array:
        scores = (Score(distant, (0.1, 3) if args is None else args),)
        return (dot_product_attention(q, q, q, scores=scores, kernel=kernel) ** 2).sum()

    given = jnp.float32(0.1), jnp.int32(3)
    np.testing.assert_allclose(gradient(q, None), gradient(q, given), rtol=1e-5, atol=1e-6)


NUMBERS = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


class Listed(Mask):
    """A user-defined mask with a table that it indexes."""

    table: Any

    def allowed(self, at: Any) -> Any:
        return self.table[at.row, at.k]


class Shifted(ScoreMod):
    """A user-defined score with a table that it indexes."""

    table: Any

    def __call__(self, score: jax.Array, at: Any) -> jax.Array:
        return score + self.table[at.row, at.q]


TABLES: dict[str, Callable[[np.ndarray], Any]] = {
    "predicate": lambda x: {"mask": Predicate(lambda b, n, i, j, t: t[b, j], (x > 0,))},
    "nested": lambda x: {"mask": Causal() | PerHead([Listed(x > 0), Causal(), ~Listed(x > 0)])},
    "score": lambda x: {"scores": (Score(lambda s, b, n, i, j, t: s + t[b, i], (x,)),)},
    "own score": lambda x: {"scores": (Shifted(x),), "mask": Causal()},
}


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kernel", ["reference", "blockwise", "checkpointed", "decode"])
def test_functions_index_numpy_tables(kernel: str, name: str) -> None:
    """Kernels give them traced coordinates, which cannot index a NumPy array."""
    q = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 3, 8)), jnp.float32)

    def attend(kernel: str, table: Any) -> jax.Array:
        return dot_product_attention(q, q, q, kernel=kernel, **TABLES[name](table))

    wanted = jax.jit(attend, static_argnums=0)("reference", jnp.asarray(NUMBERS))
    found = jax.jit(lambda: attend(kernel, NUMBERS))()
    np.testing.assert_allclose(found, wanted, atol=1e-6)
