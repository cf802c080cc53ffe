"""Position encodings against their formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha.positions import (
    Axial,
    DynamicNtk,
    MRope,
    Ntk,
    PositionEmbedding,
    Rotary,
    rotary,
    sinusoidal,
)
from tests.support import oracle
from tests.support.meshes import KINDS, on
from tests.support.platforms import pretend

KEY = jax.random.key(0)
# Angles up to 1000 are rounded to float32 (6e-8 of 1000) before their sine is taken.
ANGLE = 1e-4
T, D = 5, 6
ROWS = np.array([[0, 3, 1, 7, 7], [9, 2, 0, 1, 4]])


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("D", "base"), [(1, 50.0), (2, 1e4), (7, 50.0), (16, 1e4)])
def test_sinusoidal_matches_formula(D: int, base: float) -> None:
    expected = oracle.sinusoidal(np.arange(1000), D, base)
    table, rows = jax.jit(lambda at: [sinusoidal(x, D, base=base) for x in (1000, at)])(ROWS)
    np.testing.assert_allclose(table, expected, atol=ANGLE)
    np.testing.assert_allclose(rows, expected[ROWS], atol=ANGLE)


def test_sinusoidal_halves_match_formula() -> None:
    """The fastest and slowest wavelengths are 2π and 2π·base. Sines come first."""
    angles = np.arange(1000)[:, None] * np.exp(-np.log(10_000.0) / (D // 2 - 1) * np.arange(D // 2))
    expected = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    x = normal(2, T, D)
    actual = PositionEmbedding("sinusoidal_halves").apply({}, x, ROWS)
    np.testing.assert_allclose(actual, x + expected[ROWS], atol=ANGLE)


def test_sinusoidal_computes_angles_in_float32() -> None:
    low = sinusoidal(300, D, dtype=jnp.bfloat16)
    assert low.dtype == jnp.bfloat16
    # The angles are float32; only the sine is rounded, to 8 significand bits.
    np.testing.assert_allclose(
        low.astype(np.float32), oracle.sinusoidal(np.arange(300), D), atol=2**-8
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("batch", "rest", "per_row"), [((), 0, False), ((2, 3), 1, True)])
def test_rotary_matches_formula(
    batch: tuple[int, ...], rest: int, per_row: bool, interleaved: bool
) -> None:
    x = normal(*batch, T, 2, 6 * (1 + rest))
    positions = np.random.default_rng(1).integers(0, 1000, (*batch, T) if per_row else (T,))
    how = {"fraction": 1 / (1 + rest), "interleaved": interleaved, "base": 100.0}
    turned = jax.jit(Rotary(**how))(x, positions)
    np.testing.assert_allclose(turned, oracle.rotary(x, positions, **how), atol=1e-3)
    np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("fraction", "interleaved"), [(1.0, False), (0.5, False), (0.5, True)])
def test_tpus_rotate_to_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, dtype: str, fraction: float, interleaved: bool
) -> None:
    """Outputs to the bit, and gradients, of the form without halves. JAX has no jit here."""
    x = jnp.asarray(normal(2, T, 3, 16), dtype)
    turn = Rotary(fraction=fraction, interleaved=interleaved, scaling=Ntk(4.0))
    cotangent = jnp.asarray(normal(3, 16), dtype)
    results = []
    for platform in ("cpu", "tpu"):
        pretend(monkeypatch, platform)
        with jax.disable_jit():
            out, pull = jax.vjp(lambda x: turn(x, ROWS), x)
            results.append((out, *pull(jnp.broadcast_to(cotangent, out.shape))))
    (out, dx), (same, other_dx) = results
    np.testing.assert_array_equal(out, same)
    assert oracle.error(np.float32(other_dx), np.float32(dx)) < jnp.finfo(dtype).eps


FAR = np.array([4095, 4096, 100_000, 1_000_000, 2**24, 2**24 + 1, 2**31 - 2])


@pytest.mark.parametrize(
    ("rotation", "how"),
    [
        (Rotary(), {}), (Rotary(5e5, 0.5, True), {"base": 5e5, "fraction": 0.5, "interleaved": 1}),
        (MRope((1, 3)), {}), (Axial((2**31 - 1,)), {}),
    ],
)  # fmt: skip
def test_far_positions_keep_their_digits(rotation: Any, how: Any) -> None:
    """The oracle is in float64. Nearer positions keep their float32 products, to the bit."""
    at = np.stack([FAR, FAR - 1] + ([] if isinstance(rotation, Axial) else [-FAR]))
    x = normal(*at.shape, 1, 8)
    turned, angles = jax.jit(lambda x, at: (rotation(x, at), rotation.angles(x, at)[0]))(x, at)
    is_far, want = np.abs(at) >= 4096, oracle.rotary(x, at, **how)
    np.testing.assert_allclose(turned[is_far], want[is_far], atol=3e-6)
    pairs = angles.shape[-1]
    theta = jnp.float32(rotation.base) ** (-(1 / pairs) * jnp.arange(pairs, dtype=jnp.float32))
    near = np.float32(at[~is_far])[:, None] * np.asarray(theta)
    np.testing.assert_array_equal(angles[~is_far], near)


def test_far_sinusoids_and_traced_frequencies() -> None:
    """A traced θ is rounded, but alike everywhere."""
    np.testing.assert_allclose(sinusoidal(FAR, D)[1:], oracle.sinusoidal(FAR, D)[1:], atol=2e-6)
    q, k = normal(2, 1, 1, 8)
    turn = jax.jit(Rotary(scaling=DynamicNtk(4.0, 8)))
    scores = []
    for end in (10_000, 2**24 + 3):
        rows = [np.broadcast_to(x, (3, 1, 8)) for x in (q, k)]
        i, j = np.array([end - 7, 5000, 2**24 + 4]), np.array([end - 3, 5000, 2**24 + 4])
        scores.append((turn(rows[0], i)[0] * turn(rows[1], j)[0]).sum())
    np.testing.assert_allclose(*scores, atol=3e-6)


def test_rotary_computes_angles_in_float32() -> None:
    x = normal(300, 1, 8)
    low = rotary(x.astype(jnp.bfloat16), np.arange(300))
    assert low.dtype == jnp.bfloat16
    # Input and output are rounded, the angles are not.
    assert oracle.error(low.astype(np.float32), oracle.rotary(x, np.arange(300))) < 2**-8
    with jax.enable_x64(True):
        x64 = x.astype(np.float64)
        turned = rotary(x64, np.arange(300))
        assert turned.dtype == jnp.float64
        np.testing.assert_allclose(turned, oracle.rotary(x64, np.arange(300)), atol=ANGLE)


def applied(
    x: np.ndarray, positions: Any = None, **fields: Any
) -> tuple[jax.Array, dict[str, np.ndarray]]:
    module = PositionEmbedding(**fields)
    params = jax.eval_shape(module.init, KEY, x).get("params", {})
    params = {name: normal(*leaf.shape).astype(leaf.dtype) for name, leaf in params.items()}
    return jax.jit(module.apply)({"params": params}, x, positions), params


@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "none"])
@pytest.mark.parametrize("at", [None, ROWS, ROWS[0]], ids=["counted", "rows", "shared"])
def test_embedding_adds_its_table(kind: str, at: np.ndarray | None) -> None:
    """Without positions, tokens count from 0, in any number of batch axes."""
    x = normal(2, T, D) if at is not None else normal(2, 3, T, D)
    out, params = applied(x, at, kind=kind, max_length=10)
    assert params.keys() == ({"embedding"} if kind == "learned" else set())
    table = {
        "learned": params.get("embedding"),
        "sinusoidal": oracle.sinusoidal(np.arange(10), D),
        "none": np.zeros((10, D)),
    }[kind]
    np.testing.assert_allclose(out, x + table[np.arange(T) if at is None else at], atol=1e-6)


def test_embedding_dtypes_follow_fields() -> None:
    for dtype, given in [("bfloat16", "float32"), (None, "bfloat16")]:
        out, params = applied(normal(T, D).astype(given), dtype=dtype)
        assert (out.dtype, params["embedding"].dtype) == ("bfloat16", "float32")
    _, params = applied(normal(T, D), param_dtype="bfloat16")
    assert params["embedding"].dtype == "bfloat16"


ROTATIONS: dict[str, Any] = {
    "halves": Rotary(), "pairs": Rotary(interleaved=True),
    "growing": Rotary(interleaved=True, scaling=DynamicNtk(2.0, 4)),
    "half": Rotary(interleaved=True, fraction=0.5), "grid": Axial((8,)),
    "sections": MRope((1,)),
}  # fmt: skip
SIZES = [((4, 2), 2), *(pytest.param((4, 2), H, marks=pytest.mark.slow) for H in (4, 64))]
SPECS = [P("data"), P("data", None, "model"), P(None, None, None, "model")]


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "H"), SIZES)
def test_rotations_on_meshes(kind: str, shape: tuple[int, int], H: int) -> None:
    """Rows, heads or features are sharded, and rules are not needed. JAX shards pairs itself."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8, 2, H)), jnp.float32)
    rotations = ROTATIONS | {"sections": MRope((H // 2,))}
    if H == 2:
        del rotations["half"]

    def loss(x: jax.Array) -> Any:
        out = [rotate(x, jnp.arange(8)) for rotate in rotations.values()]
        return sum(jnp.sum(jnp.sin(3 * y)) for y in out), out

    wanted = jax.jit(jax.grad(loss, has_aux=True))(x)
    with on(kind, (), shape) as mesh:
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for spec in SPECS]
        got = jax.jit(lambda xs: [jax.grad(loss, has_aux=True)(x) for x in xs])(placed)
        for one in jax.device_get(got):
            for a, b in zip(*map(jax.tree.leaves, (one, wanted)), strict=True):
                assert oracle.error(a, b) < 1e-5
