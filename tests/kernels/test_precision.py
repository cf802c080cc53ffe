"""`precision` reaches every matmul of a kernel, forward and backward.

On GPUs float32 matmuls use TF32 by default: a matmul that `precision` did not reach would have
three digits among others with seven. For XLA's result see tests/layer/test_gpu_compile.py.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from flax_mha import dot_product_attention
from flax_mha.masks import Causal, Lengths
from flax_mha.scores import Relative, SoftCap

B, T, S, N, K, H = 2, 24, 40, 4, 2, 8
CALLS = {
    "plain": {},
    "causal": {"mask": Causal()},
    "lengths": {"mask": Lengths(jnp.array([3, 40]))},
    "scores": {"scores": (SoftCap(3.0), Relative(jnp.ones((5, H)))), "sinks": jnp.ones(N)},
    "dropout": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
}
SAID = {None: "DEFAULT", "highest": "HIGHEST", "high": "HIGH"}


def precisions(function, *args) -> list[str]:
    """Return the precision of each matmul, as lowered."""
    text = jax.jit(function).lower(*args).as_text()
    found = []
    for line in re.findall(r"stablehlo\.dot_general.*", text):
        found += re.search(r"precision = \[(\w+), (\w+)\]", line).groups()
    return found


@pytest.mark.sampled(0.042)
@pytest.mark.parametrize("precision", SAID)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kernel", ["reference", "blockwise", "decode"])
def test_precision_reaches_every_matmul(kernel: str, call: str, precision: str | None) -> None:
    q, k, v = (jnp.ones((B, n, heads, H)) for n, heads in ((T, N), (S, K), (S, K)))

    def attend(q, k, v):
        return dot_product_attention(
            q, k, v, kernel=kernel, precision=precision, return_residuals=True, **CALLS[call]
        )

    def loss(*qkv):
        out, lse = attend(*qkv)
        return jnp.sum(jnp.sin(out)) + jnp.sum(lse)

    forward, backward = (
        precisions(attend, q, k, v),
        precisions(jax.grad(loss, (0, 1, 2)), q, k, v),
    )
    exact = {"HIGHEST"} if kernel == "blockwise" else set()  # the sums of `softmax.gradient_inputs`
    assert set(forward) == {SAID[precision]}
    assert set(backward) - exact == {SAID[precision]} - exact
    assert len(forward) >= 2 * 2
    assert len(backward) >= 5 * 2


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("kernel", ["reference", "blockwise", "checkpointed"])
def test_gradients_of_parameters_are_summed_before_rounding(kernel: str) -> None:
    """A bias of half precision gets nearly opposite parts from two rows of the batch."""
    x = jnp.ones((2, 1, 1, 8), jnp.bfloat16)
    parts = jnp.array([2.3203, -2.0039], jnp.float32)

    def loss(bias: jax.Array) -> jax.Array:
        _, lse = dot_product_attention(x, x, x, bias=bias, kernel=kernel, return_residuals=True)
        return (lse[:, 0, 0] * parts).sum()

    got = jax.jit(jax.grad(loss))(jnp.zeros((1, 1, 1), jnp.bfloat16))
    assert float(got.ravel()[0]) == float(parts.sum().astype(jnp.bfloat16))


@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_gradients_of_shared_heads_are_summed_in_float32(kernel: str) -> None:
    """A sum in bfloat16 would not grow beyond 256."""
    q, k = (jax.ShapeDtypeStruct((8, heads, H), jnp.bfloat16) for heads in (4, 1))

    def loss(*qkv: jax.Array) -> jax.Array:
        return dot_product_attention(*qkv, kernel=kernel).astype(jnp.float32).sum()

    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, k))
    assert not re.findall(r":bf16\[[^]]*\] = reduce_sum", program)
