"""The numbers of the splash kernel for TPUs in Pallas' interpret mode."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import dot_product_attention, sharding
from flax_mha.base.coordinates import whole
from flax_mha.base.shapes import Dims
from flax_mha.masks import (
    Causal,
    Dense,
    Lengths,
    Mask,
    Predicate,
    Prefix,
    Segments,
    Window,
)
from flax_mha.scores import SoftCap
from tests.kernels.oracle_check import B, H, N, arrays, check, table

T, S = 280, 300
RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(-2, 3, (B, S)), axis=1)
# The second row's keys lack its first queries' segment: these are fully masked.
PACKED = Segments(jnp.asarray(IDS[:, :T]), jnp.asarray(np.maximum(IDS, [[-2], [0]])))
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Window(20, 3),
    "causal window": Causal() & Window(left=130),
    "prefix": Prefix(40),
    "segments": PACKED,
    "packed": Causal() & PACKED,
    "packed window": Causal() & PACKED & Window(left=40),
    "lengths": Lengths(jnp.array([100, 0])),
    "lengths of queries": Lengths(jnp.array([100, 300]), jnp.array([280, 5])) & Causal(),
    "keys": Dense(jnp.asarray(RNG.random((B, 1, 1, S)) < 0.5)) & Causal(),
    "predicate": Predicate(lambda b, n, i, j, m: (i + j) % m == 0, (np.array(3),)),
    "not": ~(Causal() & Window(100)),
    "nothing": Window(0, 0) & ~Causal(),
}


run = functools.partial(dot_product_attention, kernel="splash")


def check_splash(operands: list[jax.Array], known: dict, call: dict) -> None:
    check("splash", operands, known, lambda _: call, {}, has_lse=False)


@pytest.mark.sampled(0.015)
@pytest.mark.parametrize(
    ("mask", "K"),
    [*((mask, 2) for mask in MASKS), ("packed", 1), ("packed", 4)],
)
def test_splash_masks_match_oracle(tpu, mask: str, K: int) -> None:
    known = {"allowed": table(MASKS[mask], T, S)}
    check_splash(arrays(T, S, K), known, {"mask": MASKS[mask]})


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "K"), [("none", 4), ("packed", 1), ("lengths", 4)])
def test_splash_soft_cap_matches_oracle(tpu, mask: str, K: int) -> None:
    q, *others = arrays(T, S, K)
    known = {"allowed": table(MASKS[mask], T, S), "cap": 1.5}
    check_splash([4 * q, *others], known, {"mask": MASKS[mask], "scores": (SoftCap(1.5),)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("t", "s", "K"), [(1, 1, 4), (7, 64, 1), (129, 257, 4), (1, 600, 1), (256, 128, 4)]
)
def test_splash_sizes_match_oracle(tpu, t: int, s: int, K: int) -> None:
    mask = Causal() | Window(3, 3)
    check_splash(arrays(t, s, K), {"allowed": table(mask, t, s)}, {"mask": mask})


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["none", "packed"])
def test_splash_bfloat16_matches_oracle(tpu, mask: str) -> None:
    """The scale is a power of two. Other scales round the queries once more."""
    known = {"allowed": table(MASKS[mask], T, S), "scale": 0.25}
    operands = arrays(T, S, 2, "bfloat16")
    check_splash(operands, known, {"mask": MASKS[mask], "scale": 0.25})


def test_fully_masked_queries_have_outputs_and_gradients_of_0(tpu) -> None:
    *qkv, cotangent = arrays(T, S, 2)
    out, pull = jax.vjp(lambda *qkv: run(*qkv, mask=MASKS["packed"]), *qkv)
    empty = ~table(MASKS["packed"], T, S).any(-1)[:, 0]
    assert empty.any()
    for x in (out, pull(cotangent)[0]):
        np.testing.assert_array_equal(x[empty], 0)
        assert np.isfinite(x).all()


@pytest.mark.slow
@pytest.mark.parametrize("skipped", [False, True])
def test_masked_pairs_do_not_leak(tpu, skipped: bool) -> None:
    """Huge numbers in masked pairs change neither outputs nor gradients."""
    *qkv, cotangent = arrays(T, S, 2)
    q, k, v = qkv
    call = {"mask": Predicate(lambda b, n, i, j: (j != 4) & (i != 2))}
    if skipped:
        # The first block of queries visits no keys.
        mask = Causal() & Predicate(lambda b, n, i, j: j != 134)
        call = {"mask": mask, "kv_positions": 130}

    @jax.jit
    def both(q, k, v):
        out, pull = jax.vjp(lambda *qkv: run(*qkv, **call), q, k, v)
        return out, *pull(cotangent)

    clean = both(q, k, v)
    for huge in (1e36, -1e36):
        dirty = both(q.at[:, 2].set(huge), k.at[:, 4].set(huge), v.at[:, 4].set(huge))
        for got, want in zip(dirty, clean, strict=True):
            np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(clean[0][:, 2], 0)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_splash_under_vmap_remat_and_scan_matches_batch(tpu, batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (
        jnp.asarray(rng.normal(size=(*batch, L, M, H)), jnp.float32)
        for L, M in ((140, 4), (150, 2), (150, 2))
    )
    segments = jnp.asarray(rng.integers(0, 2, (*batch, 150)))

    def one(q, k, v, segments):
        mask = Causal() & Segments(segments[..., :140], segments)
        return run(q, k, v, mask=mask)

    mapped = one
    for _ in batch:
        mapped = jax.vmap(mapped)

    def scanned(q, k, v, segments):
        def step(carry, _):
            return carry + jax.remat(one)(q + carry * 0, k, v, segments), None

        return jax.lax.scan(step, jnp.zeros(q.shape), None, length=2)[0] / 2

    def both(attend, *args):
        loss = lambda *qkv: (attend(*qkv, args[-1]) ** 2).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args[:3])

    expected = both(one, q, k, v, segments)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5)
    for attend in (mapped, scanned):
        jax.tree.map(close, both(attend, q, k, v, segments), expected)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("mapped", ["q", "k", "v", "lengths", "qk", "qkv"])
def test_vmap_over_any_arguments(tpu, mapped: str) -> None:
    """Some operands have the axis, the others are shared."""
    R, rng = 2, np.random.default_rng(3)
    names = [mapped] if len(mapped) > 3 else list(mapped)
    sizes = {"q": (140, 4, H), "k": (150, 2, H), "v": (150, 2, H)}
    given = {n: jnp.asarray(rng.normal(size=(R, *size)), "float32") for n, size in sizes.items()}
    given["lengths"] = jnp.array([100, 0])
    given = {name: x if name in names else x[0] for name, x in given.items()}

    def one(q, k, v, lengths):
        def loss(q, k, v):
            return (run(q, k, v, mask=Lengths(lengths) & Causal()) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    rows = [{n: x[r] if n in names else x for n, x in given.items()} for r in range(R)]
    each = [jax.jit(one)(*row.values()) for row in rows]
    axes = [0 if name in names else None for name in given]
    got = jax.jit(jax.vmap(one, axes))(*given.values())
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(lambda x, *rows: close(x, jnp.stack(rows)), got, *each)


POSITIONS = {
    "counted": (20, 5),
    "reversed queries": (np.arange(T)[::-1], None),
    "every third query": (3 * np.arange(T) - 90, np.arange(S) + 7),
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", [Causal() & Window(60), Prefix(9) & Lengths(jnp.array([150, 9]))])
def test_splash_positions_match_oracle(tpu, positions: str, mask: Mask) -> None:
    operands = arrays(T, S, 2)
    q, k = POSITIONS[positions]
    q, k = (
        np.arange(L) + (x or 0) if x is None or isinstance(x, int) else x
        for x, L in ((q, T), (k, S))
    )
    dims = Dims((B,), T, S, N, 2, H, 5)
    allowed = np.asarray(mask.bind(dims).allowed(whole(dims, q, k)))
    call = {"q_positions": q, "kv_positions": k, "mask": mask, "scale": 0.7}
    check_splash(operands, {"allowed": allowed, "scale": 0.7}, call)


@pytest.mark.slow
def test_splash_takes_traced_positions_for_lengths(tpu) -> None:
    operands = arrays(T, S, 2)
    at = np.arange(S)[::-1]
    call = {"kv_positions": jnp.asarray(at), "mask": Lengths(jnp.array([30, 200]))}
    allowed = (at < np.array([[30], [200]]))[:, None, None]
    check_splash(operands, {"allowed": allowed}, call)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("mask", ["packed", "lengths of queries"])
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_splash_on_mesh_matches_one_device(tpu, mask: str, kind: str) -> None:
    qkv = arrays(T, S, 2)[:3]

    def both(qkv):
        return jax.value_and_grad(lambda qkv: (run(*qkv, mask=MASKS[mask]) ** 2).sum())(qkv)

    expected = jax.jit(both)(qkv)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType[kind],) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        got = jax.jit(both)(qkv)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, got, expected)
