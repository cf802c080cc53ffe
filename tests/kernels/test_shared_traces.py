"""Layers with equal kernel calls share a trace."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, dot_product_attention, masks
from flax_mha.kernels.xla import blockwise
from tests.support import oracle


class Layers(nn.Module):
    count: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.count):
            layer = MultiHeadAttention(
                2, kernel="blockwise", mask=masks.Causal(), name=f"layer_{i}"
            )
            x = x + layer(x)
        return x


@pytest.mark.parametrize("gradient", [False, True])
def test_layers_share_a_trace(monkeypatch: pytest.MonkeyPatch, gradient: bool) -> None:
    calls: list[Any] = []
    real = blockwise._visit
    monkeypatch.setattr(blockwise, "_visit", lambda *args: calls.append(0) or real(*args))

    def traced(count: int, T: int) -> int:
        model, x = Layers(count), jnp.ones((1, T, 6))
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        calls.clear()

        def call(variables: Any, x: jax.Array) -> jax.Array:
            return model.apply(variables, x).sum()

        jax.jit(jax.grad(call) if gradient else call).trace(variables, x[:, 1:])
        return len(calls)

    # Lengths that no other test traces.
    length = 145 if gradient else 141
    one, three = traced(1, length), traced(3, length + 2)
    assert one == three > 0


def operations(program: Any) -> int:
    """Return the number of operations of a program, counting loops and functions once."""
    inside = 0
    for eqn in program.eqns:
        nodes = jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns"))
        inside += sum(operations(getattr(x, "jaxpr", x)) for x in nodes if hasattr(x, "eqns"))
    return len(program.eqns) + inside


@pytest.mark.parametrize(("mask", "most"), [(None, 200), (masks.Causal(), 500)])
def test_few_operations_are_traced(mask: Any, most: int) -> None:
    """The time of tracing is proportional to their number."""
    q = jax.ShapeDtypeStruct((1, 2048, 8, 64), jnp.float32)

    def attend(q: jax.Array) -> jax.Array:
        return dot_product_attention(q, q, q, mask=mask, kernel="blockwise").sum()

    assert operations(jax.make_jaxpr(jax.grad(attend))(q).jaxpr) < most


@pytest.mark.sampled(0.15, slow=0.34)
def test_user_functions_are_traced_in_every_call() -> None:
    """The variables that they read may change."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 9, 2, 4)).astype(np.float32) for _ in range(3))
    i, j = np.indices((9, 9))
    stride = [0]

    def rule(b: Any, n: Any, i: Any, j: Any) -> Any:
        return (i - j) % stride[0] == 0

    for stride[0] in (3, 2):
        actual = dot_product_attention(q, k, v, mask=masks.Predicate(rule), kernel="blockwise")
        expected = oracle.attention(q, k, v, allowed=(i - j) % stride[0] == 0)[0]
        np.testing.assert_allclose(actual, expected, atol=1e-5)
