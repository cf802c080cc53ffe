"""Further promises of every kernel's calls: scale, weights, user-defined scores, the choice."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention, explain, kernels
from flax_mha.base.shapes import attention_dims
from flax_mha.kernels.call.bind import bind_call
from flax_mha.kernels.xla import tile_plan
from flax_mha.masks import Causal, Lengths, PerHead, Predicate, Window
from flax_mha.scores import Score
from tests.kernels.cases import KERNELS, pairs
from tests.support import oracle

B, T, S, N, K, H = 2, 140, 150, 4, 2, 8
LENGTHS = np.random.default_rng(0).integers(0, S, (B, T))
MASKS = {
    "none": (None, None),
    "causal": (Causal(), np.arange(S) <= np.arange(T)[:, None]),
    "lengths": (Lengths(jnp.asarray(LENGTHS)), (np.arange(S) < LENGTHS[..., None])[:, None]),
}
masks = pytest.mark.parametrize("mask", MASKS)
every = pytest.mark.parametrize("kernel", KERNELS)


@functools.cache
def arrays(dtype: str = "float32") -> list[jax.Array]:
    """Return q, k, v and a cotangent."""
    rng = np.random.default_rng(1)
    sizes = [(T, N, H), (S, K, H), (S, K, H), (T, N, H)]
    return [jnp.asarray(rng.normal(size=(B, *size)), dtype) for size in sizes]


def pulled(call: Any, *primals: Any) -> list[jax.Array]:
    """Return the result of a call and the gradients of its arguments."""

    @jax.jit
    def run(*primals):
        out, pull = jax.vjp(call, *primals)
        return out, *pull(arrays()[3])

    return run(*primals)


@pytest.mark.sampled(0.25, slow=0.2)
@every
def test_arguments_of_a_mask_have_no_gradient(kernel: str) -> None:
    """A floating-point argument has the gradient 0, and the other gradients do not change."""
    q, k, v, _ = arrays()

    def call(q: jax.Array, reach: Any) -> jax.Array:
        mask = Predicate(lambda b, n, i, j, m: (i - j).astype(m.dtype) <= m, (reach,))
        return dot_product_attention(q, k, v, mask=mask, kernel=kernel).sum()

    dq, dreach = jax.jit(jax.grad(call, (0, 1)))(q, jnp.float32(2.5))
    assert dreach == 0
    np.testing.assert_array_equal(dq, jax.jit(jax.grad(call))(q, jnp.int32(2)))


# All pairs of these occur, not their whole product; so below.
@pytest.mark.sampled(0.1)
@pytest.mark.parametrize(
    ("kernel", "mask", "traced"), pairs(kernel=KERNELS, mask=(*MASKS,), traced=(False, True))
)
def test_scale_matches_oracle(kernel: str, mask: str, traced: bool) -> None:
    ours, allowed = MASKS[mask]
    q, k, v, cotangent = arrays()
    scale = jnp.float32(0.7) if traced else 0.7
    results = pulled(
        lambda *qkv: dot_product_attention(*qkv, mask=ours, scale=scale, kernel=kernel), q, k, v
    )
    known = {"scale": 0.7, "allowed": allowed}
    expected, _, _ = oracle.attention(q, k, v, **known)
    exact = oracle.attention_gradients(q, k, v, cotangent=cotangent, **known)
    for got, want in zip(results, (expected, *exact), strict=False):
        assert oracle.error(got, want) < (2e-6 if want is expected else 1e-5)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize(
    ("kernel", "mask", "dtype"),
    pairs(kernel=KERNELS, mask=(*MASKS,), dtype=("float32", "bfloat16")),
)
def test_returned_weights_match_oracle(kernel: str, mask: str, dtype: str) -> None:
    """They are the weights before dropout."""
    bound = {"float32": 2e-6, "bfloat16": 4e-3}[dtype]
    ours, allowed = MASKS[mask]
    q, k, v, _ = arrays(dtype)
    _, weights = jax.jit(
        lambda *qkv: dot_product_attention(
            *qkv, mask=ours, kernel=kernel, return_weights=True, dropout_rate=0.5,
            dropout_rng=jax.random.key(0),
        )
    )(q, k, v)  # fmt: skip
    _, _, expected = oracle.attention(q, k, v, allowed=allowed)
    assert weights.dtype == dtype
    assert oracle.error(weights, expected) < bound


@pytest.mark.slow
@masks
def test_kernels_agree_on_user_defined_scores(mask: str) -> None:
    """With gradients of their arguments, under dropout."""

    def user_score(s, row, head, i, j, w):
        return s * (1 + w * jnp.cos(i - j + head + row))

    results = [
        pulled(
            lambda q, k, v, w, kernel=kernel: dot_product_attention(
                q, k, v, mask=MASKS[mask][0], kernel=kernel, dropout_rate=0.3,
                dropout_rng=jax.random.key(7),
                scores=(Score(user_score, (w,)),),
            ),
            *arrays()[:3], jnp.float32(0.5),
        )
        for kernel in KERNELS
    ]  # fmt: skip
    for other in results:
        for got, want in zip(other, results[0], strict=True):
            assert oracle.error(got, want) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 2, 4])
def test_rows_and_heads_computed_together(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the mask, the sink and the dropout of its own row and head."""
    monkeypatch.setattr(tile_plan.Plan, "rows_together", together)
    q, k, v, _ = arrays()
    call = {
        "mask": PerHead([Causal(), Window(20, 9), ~Causal(), Causal()]),
        "sinks": jnp.arange(4.0), "dropout_rate": 0.4, "dropout_rng": jax.random.key(1),
    }  # fmt: skip

    def attend(kernel: str, *qkv: jax.Array) -> jax.Array:
        return dot_product_attention(*qkv, **call, kernel=kernel)

    want, got = (
        pulled(functools.partial(attend, kernel), q, k, v) for kernel in ("reference", "blockwise")
    )
    for a, b in zip(got, want, strict=True):
        assert oracle.error(a, b) < 1e-5


def test_number_of_rows_computed_together() -> None:
    def together(b: int, t: int) -> int:
        q = jnp.zeros((b, t, 6, 8))
        *_, spec = bind_call(q, q, q, mask=Causal())
        return tile_plan.plan_call(spec, attention_dims(q, q, q))[0].rows_together

    # All small ones, then as many as divide them evenly.
    assert together(1, 256) == 6
    assert together(5, 1024) == 2
    assert together(1, 8192) == 1


def test_explain_runs_nothing_and_tells_the_choice() -> None:
    shape = jax.ShapeDtypeStruct((2, 10**6, 4, 64), jnp.bfloat16)
    explanation = explain(shape, shape, shape, mask=Causal())
    assert explanation.chosen in KERNELS
    assert [line.split()[0] for line in str(explanation).splitlines()] == list(kernels.KERNELS)
    assert "chosen" in str(explanation)


def test_compiler_does_not_compute_static_masks(optimized: None) -> None:
    """The gradient's program holds no table of the mask, which takes XLA seconds to compute."""
    q = jnp.ones((1, 96, 1, 8))

    def loss(q: jax.Array) -> jax.Array:
        mask = Causal() & Window(9)
        return dot_product_attention(q, q, q, mask=mask, kernel="reference").sum()

    text = jax.jit(jax.grad(loss)).lower(q).compile().as_text()
    assert not re.findall(r"\[[\d,]*96,96\]\S* constant", text)
