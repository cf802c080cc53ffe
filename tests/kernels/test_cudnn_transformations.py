"""The kernel for NVIDIA GPUs under vmap, scan, remat and meshes, with a model of cuDNN."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import dot_product_attention, sharding
from flax_mha.masks import Causal, Lengths
from tests.kernels.cases import pairs
from tests.kernels.half_precision import close, run
from tests.kernels.oracle_check import HV, B, H, N, arrays

T, S = 40, 64


@pytest.mark.slow
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_cudnn_under_vmap_remat_and_scan_matches_batch(nvidia, batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (
        jnp.asarray(rng.normal(size=(*batch, L, M, H)), jnp.bfloat16)
        for L, M in ((T, 4), (S, 2), (S, 2))
    )
    lengths = jnp.asarray(rng.integers(0, S, batch))

    def one(q, k, v, lengths):
        return dot_product_attention(q, k, v, mask=Causal() & Lengths(lengths), kernel="cudnn")

    mapped = one
    for _ in batch:
        mapped = jax.vmap(mapped)

    def scanned(q, k, v, lengths):
        def step(carry, _):
            return carry + jax.remat(one)(q + carry * 0, k, v, lengths), None

        return jax.lax.scan(step, jnp.zeros_like(q), None, length=2)[0] / 2

    def both(attend, *args):
        loss = lambda *qkv: (attend(*qkv, args[-1]) ** 2).sum(dtype=jnp.float32)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args[:3])

    expected = both(one, q, k, v, lengths)
    for attend in (mapped, scanned):
        jax.tree.map(close, both(attend, q, k, v, lengths), expected)


OPERANDS = ("q", "k", "v", "bias", "lengths")
# Of any two both are mapped, either alone, and neither; each over the axis 0 and the axis 1.
MAPPED = [
    (tuple(itertools.compress(OPERANDS, row)), axis)
    for *row, axis in pairs(**dict.fromkeys(OPERANDS, (0, 1)), axis=(0, 1))
    if any(row)
]


@pytest.mark.slow
@pytest.mark.parametrize(("mapped", "axis"), MAPPED)
def test_vmap_over_any_arguments(nvidia, mapped: tuple[str, ...], axis: int) -> None:
    """Some operands have the axis, the others are shared."""
    R, heads = 3, (N, 1)[axis]
    rng = np.random.default_rng(3)
    sizes = {"q": (B, T, N, H), "k": (B, S, 2, H), "v": (B, S, 2, H), "bias": (heads, T, S)}
    given = {
        name: jnp.asarray(rng.normal(size=(R, *size)), jnp.bfloat16) for name, size in sizes.items()
    }
    given["lengths"] = jnp.asarray(rng.integers(0, S, (R, B)))
    given = {name: x if name in mapped else x[0] for name, x in given.items()}
    _, _, _, cotangent = arrays(T, S, 2, "bfloat16")
    cotangent = jnp.pad(cotangent, ((0, 0),) * 3 + ((0, H - HV),))

    def one(q, k, v, bias, lengths):
        out, pull = jax.vjp(
            lambda *x: run(*x[:3], bias=x[3], mask=Causal() & Lengths(lengths)), q, k, v, bias
        )
        return *out, *pull((cotangent, jnp.ones((B, N, T))))

    expected = [
        one(*(x[r] if name in mapped else x for name, x in given.items())) for r in range(R)
    ]
    axes = [axis if name in mapped else None for name in given]
    moved = [jnp.moveaxis(x, 0, axis) if name in mapped else x for name, x in given.items()]
    got = jax.jit(jax.vmap(one, axes))(*moved)
    for one_got, want in zip(got, zip(*expected, strict=True), strict=True):
        close(one_got, jnp.stack(want))


@pytest.mark.sampled(0.13, slow=0.2)
def test_jacobian_matches_reference(nvidia) -> None:
    """Only the cotangent is mapped."""
    q, k, v, _ = (x[:1, :2] for x in arrays(T, S, 2, "bfloat16"))
    results = [
        jax.jit(jax.jacrev(lambda q, kernel=kernel: run(q, k, v, kernel, mask=Causal())[0]))(q)
        for kernel in ("cudnn", "reference")
    ]
    jax.tree.map(close, *results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [None, Lengths(jnp.array([13, 64]), jnp.array([40, 5])) & Causal()],
    ids=["none", "lengths"],
)
@pytest.mark.parametrize("shape", [None, (T, S), (B, N, T, S)], ids=str)
def test_cudnn_on_mesh_matches_one_device(nvidia, mask, shape: tuple[int, ...] | None) -> None:
    qkv = arrays(T, S, 2, "bfloat16")[:3]
    rng = np.random.default_rng(4)
    bias = None if shape is None else jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    def both(qkv, bias):
        def loss(qkv, bias):
            out, lse = run(*qkv, mask=mask, bias=bias)
            lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
            return (out**2).sum(dtype=jnp.float32) + lse.sum()

        return jax.value_and_grad(loss, 0 if bias is None else (0, 1))(qkv, bias)

    expected = jax.jit(both)(qkv, bias)
    kind = AxisType.Explicit if mask is None else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        got = jax.jit(both)(qkv, bias)
    jax.tree.map(functools.partial(close, bound=2e-2), got, expected)
