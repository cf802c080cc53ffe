"""Layers with equal kernel calls share a trace."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, dot_product_attention, masks
from flax_mha.kernels.cudnn import primitives
from flax_mha.kernels.flex.tpu import kernels as flex
from flax_mha.kernels.flex.tpu import whole_rows as short
from flax_mha.kernels.xla import blockwise
from tests.support import oracle
from tests.support.platforms import pretend

# Functions that are called while a kernel is traced.
KERNELS = {
    "blockwise": ("cpu", blockwise, "_visit"), "flex": ("tpu", flex, "_run"),
    "short": ("tpu", short, "_run"), "cudnn": ("gpu", primitives, "_bind"),
}  # fmt: skip


class Layers(nn.Module):
    count: int
    kernel: Any
    mask: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.count):
            layer = MultiHeadAttention(
                2, kernel=self.kernel, mask=self.mask, dtype=x.dtype, name=f"layer_{i}"
            )
            x = x + layer(x)
        return x


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_layers_share_a_trace(monkeypatch: pytest.MonkeyPatch, gradient: bool, kernel: str) -> None:
    platform, module, name = KERNELS[kernel]
    # Trace for one device of the platform.
    pretend(monkeypatch, platform)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(primitives, "gpu", lambda platform: ((9, 0), (9, 20, 0)))
    calls: list[Any] = []
    real = getattr(module, name)

    @functools.wraps(real)
    def counted(*args: Any, **options: Any) -> Any:
        calls.append(0)
        return real(*args, **options)

    monkeypatch.setattr(module, name, counted)

    def traced(count: int, T: int) -> int:
        model, x = Layers(count, kernel, masks.Causal()), jnp.ones((1, T, 16), jnp.bfloat16)
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        calls.clear()

        def call(variables: Any, x: jax.Array) -> jax.Array:
            return model.apply(variables, x).sum(dtype=jnp.float32)

        jax.jit(jax.grad(call) if gradient else call).trace(variables, x[:, 1:])
        return len(calls)

    # Lengths that no other test traces.
    length = 145 if gradient else 141
    one, three = traced(1, length), traced(3, length + 2)
    assert one == three > 0


WRAPS: dict[str, Callable[..., Any]] = {
    "jit": jax.jit, "remat": lambda fn: jax.jit(jax.checkpoint(fn)),
    "vmap": lambda fn: jax.jit(lambda w, x: jax.vmap(fn, (None, 0))(w, x[None])[0]),
}  # fmt: skip


@pytest.mark.sampled(0.072)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(("kernel", "length"), [("flex", 171), ("short", 43), ("splash", 173)])
def test_layers_that_share_a_trace_match_reference(
    sharing_tpu: None, rng: np.random.Generator, kernel: str, length: int, wrap: str
) -> None:
    x = jnp.asarray(rng.normal(size=(2, length, 16)), jnp.float32)
    shapes = jax.eval_shape(Layers(2, kernel, masks.Causal()).init, jax.random.key(0), x)
    weights = jax.tree.map(lambda y: y / 2, oracle.random_like(shapes))

    @functools.partial(jax.jit, static_argnums=0)
    def pulled(kernel: Any, weights: Any, x: Any) -> Any:
        call = WRAPS[wrap](Layers(2, kernel, masks.Causal()).apply)
        return jax.value_and_grad(lambda *args: jnp.sin(call(*args)).sum(), (0, 1))(weights, x)

    actual, expected = (
        jax.tree.leaves(jax.device_get(pulled(name, weights, x))) for name in (kernel, "reference")
    )
    # The gradient of the keys' bias is a sum that cancels, so all have one scale.
    scale = max(np.abs(y).max() for y in expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one / scale, other / scale, atol=1e-6)


@pytest.mark.sampled(0.08)
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
