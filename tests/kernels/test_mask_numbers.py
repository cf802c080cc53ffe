"""Traced masks of numbers in every kernel: 0 and 1 as bools, and NaN for other numbers."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import KVCache, MultiHeadAttention, dot_product_attention
from flax_mha.masks import Causal, Lengths, PerHead, Window, as_mask
from tests.kernels.cases import KERNELS, pairs
from tests.kernels.test_ring import RULES
from tests.support import oracle
from tests.support.arrays import ones
from tests.support.meshes import on
from tests.support.oracle import error
from tests.support.programs import count_equations

B, T, N, H = 2, 256, 2, 8
# Kernels that run here interpreted, or on a model of cuDNN, with the fixture and dtype for each.
PLATFORMS = {
    "flex": ("tpu", "float32"),
    "short": ("tpu", "float32"),
    "cudnn": ("nvidia", "bfloat16"),
}
JOINED: dict[str, Callable[[Any], Any]] = {
    "as given": lambda m: m,
    "and": lambda m: m & Causal(),
    "and lengths": lambda m: m & Lengths(jnp.array(T // 2)),
    "or": lambda m: m | Window(0, 0),
    "not": lambda m: ~(m & Causal()),
    "per head": lambda m: PerHead([m] * N),
}


def additive(queries: int = T) -> np.ndarray:
    """Return 0 for the keys up to a query, and −1e9 for the others, for the last queries."""
    numbers = np.where(np.tri(T, dtype=bool)[-queries:], 0, -1e9).astype(np.float32)
    return np.broadcast_to(numbers, (B, 1, queries, T))


def arrays(kernel: str, queries: int = T) -> list[jax.Array]:
    """Return q, k, v and a cotangent in a dtype that the kernel takes."""
    rng, (_, dtype) = np.random.default_rng(0), PLATFORMS.get(kernel, ("", "float32"))
    sizes = (queries, T, T, queries)
    return [jnp.asarray(rng.normal(size=(B, n, N, H)), dtype) for n in sizes]


def both(kernel: str, q: Any, k: Any, v: Any, cotangent: Any, mask: Any) -> Any:
    """Return the output, and the gradients of q, k and v."""

    def run(*qkv: jax.Array) -> jax.Array:
        return dot_product_attention(*qkv, mask=mask, kernel=kernel.split()[0])

    out, pull = jax.vjp(run, q, k, v)
    return out, *pull(cotangent)


WAYS: dict[str, Callable[..., Any]] = {
    "jit": lambda f, q, k, v, dout, m: f(q, k, v, dout, m),
    "vmap": lambda f, *x: jax.tree.map(
        lambda y: y[:, 0], jax.vmap(f)(*(jnp.asarray(y)[:, None] for y in x))
    ),
    "scan": lambda f, *x: jax.lax.scan(lambda _, m: (f(*x[:-1], m), ()), f(*x), x[-1][None])[0],
}  # fmt: skip


@pytest.mark.sampled(0.033)
@pytest.mark.parametrize(
    ("kernel", "joined", "way"),
    pairs(kernel=(*KERNELS, "decode", *PLATFORMS), joined=(*JOINED,), way=(*WAYS,)),
)
def test_zeros_and_ones_are_bools_and_other_numbers_give_nan(
    kernel: str, joined: str, way: str, request: pytest.FixtureRequest
) -> None:
    """No other mask hides the NaN. The query without other numbers, here the last, has none."""
    if kernel in PLATFORMS:
        request.getfixturevalue(PLATFORMS[kernel][0])
    queries = 8 if kernel == "decode" else T
    q, k, v, dout = arrays(kernel, queries)

    @jax.jit
    def run(mask: jax.Array) -> Any:
        def called(*x: jax.Array) -> Any:
            *operands, mask = x
            return both(kernel, *operands, JOINED[joined](as_mask(mask)))

        return WAYS[way](called, q, k, v, dout, mask)

    out, *grads = (np.asarray(x, np.float32) for x in run(additive(queries)))
    assert np.isnan(out[:, :-1]).all()
    for x in (out, grads[0]):
        assert np.isfinite(x[:, -1]).all()
    assert any(np.isnan(x).any() for x in grads)
    bools = np.random.default_rng(1).random((B, 1, queries, T)) < 0.5
    # A query of each row is fully masked.
    bools[:, :, 1] = False
    out, *grads = run(bools.astype(np.float32))
    allowed = JOINED[joined](as_mask(bools)).dense(queries, T, (B,), N)
    bound = 2e-6 if q.dtype == jnp.float32 else 2**-7
    given = [*map(oracle.float64, (q, k, v))]
    assert error(out, oracle.attention(*given, allowed=allowed)[0]) < bound
    wanted = oracle.attention_gradients(*given, allowed=allowed, cotangent=oracle.float64(dout))
    for got, want in zip(grads, (wanted.q, wanted.k, wanted.v), strict=True):
        assert error(got, want) < 2 * bound


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("kernel", ["ring:blockwise", "ring:reference", "ulysses", "all_gather"])
def test_additive_masks_give_nan_on_meshes(kernel: str) -> None:
    with on("Auto", RULES, (1, 2)):
        run = jax.jit(lambda m, *x: both(kernel, *x, as_mask(m) & Causal()))
        out, *grads = map(np.asarray, run(additive(), *arrays(kernel)))
    assert np.isnan(out[:, :-1]).all()
    assert np.isfinite(out[:, -1]).all()
    assert any(np.isnan(x).any() for x in grads)


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("length", [1, 8])
def test_additive_masks_give_nan_with_a_cache(length: int) -> None:
    """In prefill and in decoding, in whose masks the numbers are joined with those of the cache."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, length, 16)), jnp.float32)
    layer = MultiHeadAttention(2, decode=True)
    variables = jax.jit(layer.init)(jax.random.key(0), np.zeros((B, 12, 16), np.float32))
    mask = np.where(np.arange(12) < length - 1, 0, -1e9).astype(np.float32)

    @jax.jit
    def run(mask: jax.Array) -> jax.Array:
        return layer.apply(variables, x, mask=mask[None, None, None], mutable="cache")[0]

    assert np.isnan(run(mask)).all()
    q = ones((B, length, N, 8))

    @jax.jit
    def extended(mask: jax.Array) -> jax.Array:
        return KVCache.empty((B,), 12, N, 8).extend(q, q, q, mask=mask)[0]

    assert np.isnan(extended(mask[None])).all()


def test_programs_pay_only_where_numbers_are_converted() -> None:
    """Bool masks pay nothing. Numbers take no factor on the queries or on the output."""
    layer, x = MultiHeadAttention(2), jnp.zeros((B, 12, 48))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def program(dtype: str) -> Any:
        def loss(variables: Any, mask: jax.Array) -> jax.Array:
            return layer.apply(variables, x, mask=mask).sum()

        mask = jax.ShapeDtypeStruct((B, 1, 12, 12), dtype)
        return jax.make_jaxpr(jax.grad(loss))(variables, mask)

    bools, numbers = program("bool"), program("float32")
    assert not {"nan", "i8", "int8"} & {*re.findall(r"\w+", str(bools))}
    for name in ("mul", "dot_general"):
        assert count_equations(numbers, name) == count_equations(bools, name)
