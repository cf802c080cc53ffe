"""Queries and keys that are rotated inside a kernel, beside those that are rotated before."""

import contextlib
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, QKNorm, dot_product_attention, masks, positions
from flax_mha.kernels.flex.tpu import rotated
from flax_mha.masks import Causal, Window
from flax_mha.scores import Alibi
from tests.kernels.contract import WAYS
from tests.support.meshes import on
from tests.support.oracle import random_like
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
    turn: Any, x: list[jax.Array], places: tuple[Any, Any] = (jnp.arange(T),) * 2,
    way: str | None = None, **call: Any,
) -> Any:  # fmt: skip
    """Return the output for q and k after turn(x, positions), and the gradients of q, k and v."""

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        def attend(*x: jax.Array) -> Any:
            q, k = (turn(y, at) for y, at in zip(x[:2], places, strict=True))
            return dot_product_attention(q, k, x[2], kernel="flex", **call)

        out, pull = jax.vjp(WAYS[way](attend) if way else attend, q, k, v)
        return out, *pull(dout)

    # The ways return one result for each row of the batch, or of the first.
    x = [y[:1] for y in x] if way == "remat" else x
    return jax.device_get(run(*x))


def close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Compare with the result of a rotation before the kernel."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(a, b, atol=tolerance * np.nanmax(np.abs(b)))


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernel_rotates_as_the_layer(rotates: list[bool], name: str, dtype: str) -> None:
    rotation, x = ROTATIONS[name], arrays(dtype)
    found = pulled(rotation.turn, x, mask=Causal() & Window(90))
    assert rotates == [True] * 3  # Queries forward and backward, and their gradients.
    expected = pulled(rotation, x, mask=Causal() & Window(90))
    close(found, expected, 1e-4 if dtype == "float32" else 2e-2)


ORDER = (jnp.arange(T),) * 2
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "positions of each row": ((SHUFFLED, SHUFFLED + 7), {"mask": Causal()}),
    "cross-attention": ((jnp.arange(T), jnp.arange(140)), {}),
    "everything": ((SHUFFLED, jnp.arange(T)), {
        "mask": masks.Lengths(jnp.array([120, 0])), "sinks": jnp.linspace(-1, 1, N),
        "dropout_rate": 0.3, "dropout_rng": jax.random.key(1),
    }),
    "vmap": (ORDER, {"mask": Causal(), "way": "vmap"}),
    "remat": (ORDER, {"mask": Causal(), "way": "remat"}),
    "scan": (ORDER, {"mask": Causal(), "way": "scan"}),
    # Tables of positions of each row are sharded as the rows.
    "mesh": ((SHUFFLED, SHUFFLED), {"mask": Causal(), "kind": "Auto"}),
    "explicit mesh": ((SHUFFLED, SHUFFLED), {"mask": Causal(), "kind": "Explicit"}),
    # Queries and keys are rotated before the kernel.
    "learned scores": (ORDER, {"scores": (Alibi(jnp.ones(N)),), "rotates": False}),
}  # fmt: skip


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", CALLS)
def test_calls_rotate_in_the_kernel(rotates: list[bool], name: str) -> None:
    places, call = CALLS[name]
    call = {"rotates": True} | call
    kind, expects = call.pop("kind", None), call.pop("rotates")
    x = arrays(S=len(places[1]) if places[1].ndim == 1 else T)
    expected = pulled(ROTATIONS["whole"], x, places, **call)
    rotates.clear()
    with on(kind, shape=(2, 2)) if kind else contextlib.nullcontext():
        found = pulled(ROTATIONS["whole"].turn, x, places, **call)
    assert set(rotates) == {expects}
    assert len(rotates) > expects  # The backward pass rotates as well.
    close(found, expected)


@pytest.mark.sampled(0.08)
def test_other_kernels_are_given_rotated_arrays(tpu: None) -> None:
    q, k, v, _ = arrays()

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def attend(turn: Any, kernel: str, **call: Any) -> Any:
            q_turned, k_turned = (turn(x, jnp.arange(T)) for x in (q, k))
            return dot_product_attention(q_turned, k_turned, v, kernel=kernel, **call)

        return [
            [attend(turn, "reference"), attend(turn, "splash"),
             attend(turn, "flex", return_weights=True)]
            for turn in (ROTATIONS["whole"].turn, ROTATIONS["whole"])
        ]  # fmt: skip

    found, expected = run(q, k, v)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, expected)


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "grouped, norm": ({"num_kv_heads": K, "qk_norm": QKNorm()}, {"positions": SHUFFLED}, True),
    "packed": ({}, {"mask": masks.Segments(SHUFFLED // 70)}, True),
    "norm after": ({"qk_norm": QKNorm(after_rotary=True)}, {}, False),
    "learned scale": ({"scale": "learned"}, {}, False),
}


@pytest.mark.sampled(0)
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
    found = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)
    assert set(rotates) == {is_left}
    pretend(monkeypatch, "cpu")
    other = layer.clone(kernel="reference")
    expected = jax.jit(
        jax.value_and_grad(lambda *args: (other.apply(*args, **call) ** 2).sum(), (0, 1))
    )(params, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max())


def test_other_readers_of_keys_get_rotated_ones(
    rotates: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other layers, captures and subclasses of a rotation."""
    layer = MultiHeadAttention(N, head_dim=H, rotary=positions.Rotary())
    x = jnp.asarray(RNG.normal(size=(2, 20, 16)), jnp.float32)
    params = random_like(jax.eval_shape(layer.init, jax.random.key(0), x))

    class Doubled(positions.Rotary):
        def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
            return 2 * super().__call__(x, positions)

    def results(params: Any, x: jax.Array) -> Any:
        _, kv = layer.apply(params, x, return_kv=True)
        _, seen = layer.apply(params, x, sow_weights=True, mutable="intermediates")
        return kv.key, seen, layer.clone(rotary=Doubled()).apply(params, x)

    found = jax.jit(results)(params, x)
    pretend(monkeypatch, "cpu")
    expected = jax.jit(lambda *args: results(*args))(params, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
