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
from tests.support import oracle

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
    known = {"allowed": table(MASKS[mask], T, S), "scores": (oracle.ScoreRule.soft_cap(1.5),)}
    check_splash([4 * q, *others], known, {"mask": MASKS[mask], "scores": (SoftCap(1.5),)})


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
