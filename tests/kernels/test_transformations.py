"""Kernels under jit, vmap, scan, remat and second derivatives."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from flax_mha import dot_product_attention
from flax_mha.kernels.xla import tile_plan
from flax_mha.masks import Causal, Lengths, Segments
from tests.kernels.cases import KERNELS, pairs
from tests.support import oracle

N, K, H, T, S = 4, 2, 8, 150, 140
OPERANDS = ("q", "k", "v", "bias", "sinks")
# Of any two both are mapped, either alone, and neither.
MAPPED = [
    tuple(itertools.compress(OPERANDS, row)) for row in pairs(**dict.fromkeys(OPERANDS, (0, 1)))
]
EVERY_DERIVATIVE = ("reference", "checkpointed")
pytestmark = pytest.mark.parametrize("kernel", KERNELS)


def arrays(*batch: int) -> dict[str, jax.Array]:
    """Return q, k, v, a bias, sinks and a cotangent, each with these leading axes."""
    rng = np.random.default_rng(2)
    sizes = {
        "q": (T, N, H), "k": (S, K, H), "v": (S, K, H),
        "bias": (N, 1, S), "sinks": (N,), "cotangent": (T, N, H),
    }  # fmt: skip
    return {
        name: jnp.asarray(rng.normal(size=(*batch, *size)), jnp.float32)
        for name, size in sizes.items()
    }


def pulled(kernel: str, **call: Any) -> Any:
    """Return a function of the arrays that computes out and all gradients."""

    def run(q, k, v, bias, sinks, cotangent):
        out, pull = jax.vjp(
            lambda q, k, v, bias, sinks: dot_product_attention(
                q, k, v, bias=bias, sinks=sinks, kernel=kernel, **call
            ),
            q, k, v, bias, sinks,
        )  # fmt: skip
        return out, *pull(cotangent)

    return run


def assert_close(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        assert oracle.error(one, other) < 1e-5


@pytest.mark.sampled(0.03)
@pytest.mark.parametrize("mapped", MAPPED, ids="_".join)
def test_vmap_over_any_arguments(kernel: str, mapped: tuple[str, ...]) -> None:
    """Some operands have the axis, the others are shared."""
    R = 2
    many, one = arrays(R), arrays()
    given = one | {name: many[name] for name in (*mapped, "cotangent")}
    axes = tuple(0 if name in (*mapped, "cotangent") else None for name in given)
    run = pulled(kernel, mask=Causal())
    got = jax.jit(jax.vmap(run, axes))(*given.values())
    loop = jax.jit(run)
    each = [
        loop(*(x if axis is None else x[r] for x, axis in zip(given.values(), axes, strict=True)))
        for r in range(R)
    ]
    assert_close(got, [jnp.stack(x) for x in zip(*each, strict=True)])


@pytest.mark.sampled(0.125)
def test_vmap_over_masks(kernel: str) -> None:
    """Each row has its own lengths and positions, which are traced."""
    x = arrays(3)
    lengths, starts = jnp.array([100, 0, S]), jnp.array([0, 40, -7])

    def one(length, start, *operands):
        mask = Causal() & Lengths(length)
        return pulled(kernel, mask=mask, q_positions=start + jnp.arange(T))(*operands)

    got = jax.jit(jax.vmap(one))(lengths, starts, *x.values())
    each = [jax.jit(one)(lengths[r], starts[r], *(a[r] for a in x.values())) for r in range(3)]
    assert_close(got, [jnp.stack(a) for a in zip(*each, strict=True)])
    np.testing.assert_array_equal(got[0][1], 0)


@pytest.mark.slow
def test_scan_and_remat_over_layers_match_loop(kernel: str) -> None:
    layers = 3
    biases = arrays(layers)["bias"]
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(2, S, N, H)), jnp.float32)
    key = jax.random.key(1)

    def layer(x, bias):
        out = dot_product_attention(
            x, x, x, mask=Causal() & Segments(np.arange(S) // 60), bias=bias, kernel=kernel,
            dropout_rate=0.2, dropout_rng=key,
        )  # fmt: skip
        return x + out, None

    def loop(x, biases):
        for bias in biases:
            x, _ = layer(x, bias)
        return (x**2).mean()

    def scanned(layer):
        return lambda x, biases: (jax.lax.scan(layer, x, biases)[0] ** 2).mean()

    expected, *results = (
        jax.jit(jax.value_and_grad(loss, (0, 1)))(x, biases)
        for loss in (loop, scanned(layer), scanned(jax.checkpoint(layer)))
    )
    for got in results:
        assert_close(jax.tree.leaves(got), jax.tree.leaves(expected))


@pytest.mark.slow
def test_kernels_agree_with_and_without_jit(kernel: str) -> None:
    x = arrays(2)
    x |= {"bias": x["bias"][0], "sinks": x["sinks"][0]}
    run = pulled(kernel, mask=Causal(), dropout_rate=0.2, dropout_rng=jax.random.key(0))
    assert_close(run(*x.values()), jax.jit(run)(*x.values()))


@pytest.mark.sampled(0.11)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_batch_dimensions_match_vmap(kernel: str, batch: tuple[int, ...]) -> None:
    q, k, v, *_ = arrays(*batch).values()

    def one(q, k, v):
        return dot_product_attention(q, k, v, mask=Causal(), kernel=kernel)

    mapped = one
    for _ in batch:
        mapped = jax.vmap(mapped)
    np.testing.assert_allclose(jax.jit(one)(q, k, v), jax.jit(mapped)(q, k, v), atol=1e-6)


@pytest.mark.sampled(0.1)
def test_later_keys_have_no_gradient(kernel: str) -> None:
    """The mask is causal, and the gradient is exactly 0."""
    x = arrays(2)
    shared = {"bias": x["bias"][0], "sinks": x["sinks"][0]}
    run = jax.jit(pulled(kernel, mask=Causal()))
    for t in (0, 63, T - 20):
        only = jnp.zeros_like(x["cotangent"]).at[:, t].set(x["cotangent"][:, t])
        _, dq, dk, dv, _, _ = run(**x | shared | {"cotangent": only})
        np.testing.assert_array_equal(dk[:, t + 1 :], 0)
        np.testing.assert_array_equal(dv[:, t + 1 :], 0)
        np.testing.assert_array_equal(jnp.delete(dq, t, axis=1), 0)
        assert (np.abs(dv[:, : t + 1]).max((0, 2, 3)) > 0).all()


@pytest.mark.slow
def test_second_derivatives(kernel: str) -> None:
    """Kernels that have them match differences. The others raise instead of returning a wrong
    number.
    """
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        sizes = [(2, 5, N, H), (2, 6, K, H), (2, 6, K, H), (N, 1, 6), (N,)]
        operands = [jnp.asarray(rng.normal(size=size)) for size in sizes]
        mask = Lengths(jnp.array([4, 0]))

        @jax.jit
        def loss(q, k, v, bias, sinks):
            return (
                dot_product_attention(q, k, v, mask=mask, bias=bias, sinks=sinks, kernel=kernel)
                ** 2
            ).sum()

        assert loss(*operands).dtype == jnp.float64
        if kernel in EVERY_DERIVATIVE:
            check_grads(loss, operands, order=2, modes=["rev", "fwd"])
            return
        check_grads(loss, operands, order=1, modes=["rev"])
        with pytest.raises(TypeError, match=f"forward mode .*, got '{kernel}'"):
            jax.jvp(loss, operands, operands)


@pytest.mark.slow
def test_gradients_of_gradients_match_reference(kernel: str) -> None:
    """Over several tiles."""
    x = arrays(2)
    q, k, v = (x[name] for name in "qkv")

    def twice(kernel):
        def loss(*qkv):
            return (dot_product_attention(*qkv, mask=Causal(), kernel=kernel) ** 2).sum()

        def slope(*qkv):
            return sum((g**2).sum() for g in jax.grad(loss, (0, 1, 2))(*qkv))

        return jax.jit(jax.grad(slope, (0, 1, 2)))(q, k, v)

    assert_close(twice(kernel), twice("reference"))


@pytest.mark.slow
def test_gradients_of_gradients_under_traced_masks(kernel: str, monkeypatch) -> None:
    """JAX can't reverse loops of unknown length. The error names the kernels without them."""
    monkeypatch.setattr(tile_plan, "_SHORT", 0)
    x = arrays(2)
    q, k, v = (x[name] for name in "qkv")

    def slope(q, lengths):
        def loss(q):
            mask = Lengths(lengths)
            return (dot_product_attention(q, k, v, mask=mask, kernel=kernel) ** 2).sum()

        return jax.grad(loss)(q).sum()

    twice = jax.jit(jax.grad(slope))
    lengths = jnp.array([S, 5])
    if kernel in EVERY_DERIVATIVE:
        assert jnp.isfinite(twice(q, lengths)).all()
    else:
        with pytest.raises(TypeError, match=f"'checkpointed' .* of gradients .*, got '{kernel}'"):
            twice(q, lengths)
