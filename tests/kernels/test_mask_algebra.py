"""Kernels under random combinations of masks, lengths and positions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flax_mha import dot_product_attention
from flax_mha.masks import Causal, Documents, Lengths, Window
from tests.kernels.cases import Case
from tests.kernels.problems import pose
from tests.kernels.scenes import MASKS, Scene
from tests.kernels.test_contract import TestBlockwise, TestCheckpointed, TestReference
from tests.support.algebra import Expression, evaluate, expressions

LENGTHS = st.integers(1, 300)


# Each example compiles: shrinking one would take minutes.
@pytest.mark.slow
@settings(max_examples=8, phases=[Phase.generate])
@given(
    expressions(MASKS),
    LENGTHS,
    LENGTHS,
    st.sampled_from(["from_0", "aligned", "scattered"]),
    st.sampled_from(["known", "traced"]),
    st.sampled_from(["plain", "all_scores"]),
    st.integers(0, 2**32 - 1),
)
def test_random_masks(
    expression: Expression, T: int, S: int, place: str, given: str, score: str, seed: int
) -> None:
    at = Scene((2,), T, S, place, seed)
    case = Case("random", "", score, "soft", "gqa", "float32", "no_dropout", place, given)
    problem = pose(at, *evaluate(expression, lambda name: _whole(at, name)), case)
    for row in (TestReference, TestBlockwise, TestCheckpointed):
        row().check(problem, given == "traced")


def _whole(at: Scene, name: str) -> tuple:
    mask, allowed = MASKS[name](at)
    return mask, at.table(allowed)


@pytest.mark.sampled(0.25, slow=0.2)
@pytest.mark.parametrize("lengths", [[3, 2], [[3, 2], [1, 4]]])
def test_documents_follow_positions(lengths: Any) -> None:
    """For the last two tokens only, as in decoding, and for tokens in another order."""
    q, k, v = (np.random.default_rng(n).normal(size=(2, 7, 2, 4)) for n in range(3))
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    mask = Documents(jnp.asarray(lengths))
    wanted = dot_product_attention(q, k, v, mask=mask)
    last = dot_product_attention(q[:, 5:], k, v, mask=mask, q_positions=5)
    np.testing.assert_allclose(last, wanted[:, 5:], atol=1e-6)
    order = np.array([4, 0, 6, 2, 5, 1, 3])
    q, k, v = (x[:, order] for x in (q, k, v))
    found = dot_product_attention(q, k, v, mask=mask, q_positions=order, kv_positions=order)
    np.testing.assert_allclose(found, wanted[:, order], atol=1e-6)


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize(
    ("kernel", "platform", "dtype"),
    [
        ("blockwise", None, "float32"),
        *(pytest.param(*row, marks=pytest.mark.slow)
          for row in [("reference", None, "float32"), ("flex", "tpu", "float32"),
                      ("splash", "tpu", "float32"), ("cudnn", "nvidia", "bfloat16")]),
    ],
)  # fmt: skip
def test_one_length_holds_for_every_example(
    kernel: str, platform: str | None, dtype: str, request: pytest.FixtureRequest
) -> None:
    """As a static or a traced number, alone and in other masks."""
    if platform is not None:
        request.getfixturevalue(platform)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 2, 64), dtype)

    @jax.jit
    def run(n: Any, each: Any) -> Any:
        def attend(q: Any, n: Any) -> jax.Array:
            masks = [Causal() & Lengths(n, 2 * n)]
            if kernel not in ("cudnn", "splash"):
                masks.append(Causal() & (Window(left=2) | Lengths(n)))
            return sum(dot_product_attention(q, k, v, mask=m, kernel=kernel) for m in masks)

        return [jax.value_and_grad(lambda q, n: (attend(q, n) ** 2).sum())(q, n)
                for n in (40, n, each)]  # fmt: skip

    static, traced, expected = run(40, jnp.array([40, 40]))
    for found in (static, traced):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
