"""Queries and keys that are rotated inside a kernel, beside those that are rotated before."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import MultiHeadAttention, QKNorm, dot_product_attention, masks, positions, sharding
from flax_mha.kernels.flex.tpu import rotated
from flax_mha.masks import Causal, Window
from flax_mha.scores import Alibi, RelativeBias
from tests.kernels.contract import WAYS
from tests.support.platforms import pretend

ROTATIONS: dict[str, Any] = {
    "whole": positions.Rotary(),
    "interleaved": positions.Rotary(base=100.0, interleaved=True),
    "part": positions.Rotary(fraction=0.5, scaling=positions.Yarn(4.0, 32)),
    "grid": positions.Axial((16, 20)),
}
T, N, K, H = 200, 4, 2, 32
RNG = np.random.default_rng(5)
SHUFFLED = jnp.asarray(RNG.permuted(np.tile(np.arange(T), (2, 1)), axis=1))


@pytest.fixture
def rotates(tpu: None, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Run on a TPU, and list whether each kernel rotates."""
    found = list[bool]()
    queries = rotated.queries

    def spy(call: Any, tables: Any, *rest: Any) -> Any:
        found.append(tables is not None)
        return queries(call, tables, *rest)

    monkeypatch.setattr(rotated, "queries", spy)
    return found


def arrays(dtype: str = "float32", S: int = T) -> list[jax.Array]:
    """Return q, k, v and a cotangent."""
    sizes = [(2, T, N, H), (2, S, K, H), (2, S, K, H), (2, T, N, H)]
    return [jnp.asarray(RNG.normal(size=size), dtype) for size in sizes]


def pulled(
    turn: Any, x: list[jax.Array], places: tuple[Any, Any] = (jnp.arange(T),) * 2, **call: Any
) -> Any:
    """Return the output for q and k after turn(x, positions), and the gradients of q, k and v."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        q, k = (turn(x, at) for x, at in zip((q, k), places, strict=True))
        return dot_product_attention(q, k, v, kernel="flex", **call)

    out, pull = jax.vjp(attend, *x[:3])
    return out, *pull(x[3])


def close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Compare with the result of a rotation before the kernel."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(a, b, atol=tolerance * np.nanmax(np.abs(b)))


def later(rotation: Any) -> Any:
    """Return a rotation that is left to the kernel."""
    return rotation.turn


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernel_rotates_as_the_layer(rotates: list[bool], name: str, dtype: str) -> None:
    rotation, x = ROTATIONS[name], arrays(dtype)
    found = pulled(later(rotation), x, mask=Causal() & Window(90))
    assert rotates == [True, True]
    expected = pulled(rotation, x, mask=Causal() & Window(90))
    close(found, expected, 1e-4 if dtype == "float32" else 2e-2)


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "positions of each row": ((SHUFFLED, SHUFFLED + 7), {"mask": Causal()}),
    "cross-attention": ((jnp.arange(T), jnp.arange(140)), {}),
    "everything": ((SHUFFLED, jnp.arange(T)), {
        "mask": masks.Lengths(jnp.array([120, 0])), "sinks": jnp.linspace(-1, 1, N),
        "dropout_rate": 0.3, "dropout_rng": jax.random.key(1),
    }),
}  # fmt: skip


@pytest.mark.sampled(0, slow=0.4)
@pytest.mark.parametrize("name", CALLS)
def test_calls_rotate_in_the_kernel(rotates: list[bool], name: str) -> None:
    places, call = CALLS[name]
    x = arrays(S=len(places[1]) if places[1].ndim == 1 else T)
    found = pulled(later(ROTATIONS["whole"]), x, places, **call)
    assert rotates == [True, True]
    close(found, pulled(ROTATIONS["whole"], x, places, **call))


@pytest.mark.slow
@pytest.mark.parametrize("scores", [[RelativeBias(jnp.ones((N, 8)))], [Alibi(jnp.ones(N))]])
def test_learned_scores_are_rotated_before(rotates: list[bool], scores: list[Any]) -> None:
    x = arrays()
    found = pulled(later(ROTATIONS["whole"]), x, scores=scores)
    assert set(rotates) == {False}
    close(found, pulled(ROTATIONS["whole"], x, scores=scores))


@pytest.mark.sampled(0.2, slow=0.3)
def test_other_kernels_are_given_rotated_arrays(tpu: None) -> None:
    q, k, v, _ = arrays()
    rotation = ROTATIONS["whole"]
    for kernel, call in (("reference", {}), ("splash", {}), ("flex", {"return_weights": True})):
        found, expected = (
            dot_product_attention(
                turn(q, jnp.arange(T)), turn(k, jnp.arange(T)), v, kernel=kernel, **call
            )
            for turn in (later(rotation), rotation)
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["vmap", "remat", "scan"])
def test_transformations(rotates: list[bool], way: str) -> None:
    def loss(turn: Any, *x: jax.Array) -> jax.Array:
        def attend(*x: jax.Array) -> jax.Array:
            q, k = (turn(y, jnp.arange(T)) for y in x[:2])
            return dot_product_attention(q, k, x[2], mask=Causal(), kernel="flex")

        return (WAYS[way](attend)(*x) ** 2).sum()

    gradients = jax.jit(jax.value_and_grad(loss, (1, 2, 3)), static_argnums=0)
    x, turns = arrays()[:3], (later(ROTATIONS["whole"]), ROTATIONS["whole"])
    close(*(gradients(turn, *x) for turn in turns))
    assert any(rotates)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_matches_one_device(rotates: list[bool], kind: AxisType) -> None:
    """Tables of positions of each row are sharded as the rows."""
    x, places = arrays(), (SHUFFLED, SHUFFLED)
    expected = pulled(ROTATIONS["whole"], x, places, mask=Causal())
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    rotates.clear()
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        found = jax.jit(lambda *x: pulled(later(ROTATIONS["whole"]), x, places, mask=Causal()))(*x)
    assert rotates
    assert all(rotates)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.slow
def test_no_race(tpu_memory: None) -> None:
    x = arrays("bfloat16")
    found = pulled(later(ROTATIONS["whole"]), x, mask=Causal())
    assert all(np.isfinite(np.asarray(y, np.float32)).all() for y in found)


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "grouped, norm": ({"num_kv_heads": K, "qk_norm": QKNorm()}, {"positions": SHUFFLED}, True),
    "packed": ({}, {"mask": masks.Segments(SHUFFLED // 70)}, True),
    "norm after": ({"qk_norm": QKNorm(after_rotary=True)}, {}, False),
    "learned scale": ({"scale": "learned"}, {}, False),
}


@pytest.mark.sampled(0, slow=0.4)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_leaves_the_rotation_to_the_kernel(
    rotates: list[bool], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fields, call, is_left = LAYERS[name]
    layer = MultiHeadAttention(
        N, head_dim=H, rotary=positions.Rotary(), mask=Causal(), kernel="flex",
        bias_init=nn.initializers.normal(), **fields,
    )  # fmt: skip
    x = jnp.asarray(RNG.normal(size=(2, T, 16)), jnp.float32)
    params = layer.init(jax.random.key(0), x[:, :4])

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (layer.apply(params, x, **call) ** 2).sum()

    rotates.clear()
    found = jax.value_and_grad(loss, (0, 1))(params, x)
    assert set(rotates) == {is_left}
    pretend(monkeypatch, "cpu")
    other = layer.clone(kernel="reference")
    expected = jax.value_and_grad(
        lambda params, x: (other.apply(params, x, **call) ** 2).sum(), (0, 1)
    )(params, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max())


def test_other_readers_of_keys_get_rotated_ones(
    rotates: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other layers, captures and subclasses of a rotation."""
    layer = MultiHeadAttention(N, head_dim=H, rotary=positions.Rotary())
    x = jnp.asarray(RNG.normal(size=(2, 20, 16)), jnp.float32)
    params = layer.init(jax.random.key(0), x)

    class Doubled(positions.Rotary):
        def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
            return 2 * super().__call__(x, positions)

    def results() -> Any:
        _, kv = layer.apply(params, x, return_kv=True)
        _, seen = layer.apply(params, x, sow_weights=True, mutable="intermediates")
        return kv.key, seen, layer.clone(rotary=Doubled()).apply(params, x)

    found = results()
    pretend(monkeypatch, "cpu")
    expected = results()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
