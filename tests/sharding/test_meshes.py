"""The same results on every mesh: none, Auto axes, Explicit axes, inside jax.shard_map."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import Capture, MultiHeadAttention, dot_product_attention, masks, scores, sharding
from flax_mha.positions import Rotary
from tests.kernels.cases import KERNELS, pairs
from tests.support.meshes import (
    BACKWARD,
    KEY,
    KINDS,
    MIXED,
    RNG,
    B,
    H,
    N,
    T,
    X,
    changed,
    compare,
    on,
)
from tests.support.oracle import error


def _scaled(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s * (n.astype(s.dtype) + 1) / (b.astype(s.dtype) + 2)


IDS = np.sort(RNG.integers(0, 3, (B, T)), axis=1)
CALLS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "causal": (8, {"mask": masks.Causal()}, sharding.RULES),
    "two groups on four devices": (2, {"mask": masks.Causal() & masks.Window(20)}, sharding.RULES),
    "one group": (1, {}, changed(kv_heads=None)),
    "masks of heads": (
        4,
        {"mask": masks.PerHead([masks.Window(9 * n, 3) for n in range(N)])},
        sharding.RULES,
    ),
    "dropout, lengths": (
        4,
        {
            "mask": masks.Lengths(jnp.array([3, 50, 0, 70])), "dropout_rate": 0.3,
            "dropout_rng": KEY,
        },
        sharding.RULES,
    ),
    "functions of rows and heads": (
        4,
        {
            "mask": masks.Segments(jnp.asarray(IDS))
            & masks.Predicate(lambda b, n, i, j: (i + j + n + b) % 5 > 0),
            "scores": (scores.Alibi(), scores.Score(_scaled)),
        },
        sharding.RULES,
    ),
    "queries over devices": (
        4,
        {
            "mask": masks.Causal() & masks.Window(40), "dropout_rate": 0.3, "dropout_rng": KEY,
            "scores": (scores.Alibi(),),
        },
        changed(heads=None, kv_heads=None, length="data", batch="model"),
    ),
}  # fmt: skip


# All pairs of these occur, not their whole product.
@pytest.mark.sampled(0.015)
@pytest.mark.parametrize(
    ("name", "kernel", "kind"), pairs(name=(*CALLS,), kernel=KERNELS, kind=(*KINDS,))
)
def test_kernels_on_meshes_match_one_device(name: str, kernel: str, kind: str) -> None:
    K, call, rules = CALLS[name]
    q, k, v = (jnp.asarray(RNG.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K))
    bias = jnp.asarray(RNG.normal(size=(N, T, T)), jnp.float32)
    sinks = jnp.arange(float(N))

    def attend(q, k, v, bias, sinks):
        out, lse = dot_product_attention(
            q, k, v, kernel=kernel, bias=bias, sinks=sinks, return_residuals=True, **call
        )
        return out, lse

    compare(attend, (q, k, v, bias, sinks), kind, rules, [P()] * 5)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("kind", KINDS)
def test_one_array_as_sinks_and_argument(kind: str) -> None:
    """Sinks are sharded like heads, the same array as a function's argument is not."""
    q, each = jnp.asarray(RNG.normal(size=(B, 12, N, H)), jnp.float32), jnp.arange(float(N))

    def attend(q, each):
        score = scores.Score(lambda s, b, n, i, j, x: s * jnp.take(x, n), (each,))
        return dot_product_attention(q, q, q, scores=(score,), sinks=each)

    compare(attend, (q, each), kind, sharding.RULES, [P("data"), P()])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_decoding_matches_one_device(kind: str) -> None:
    layer = MultiHeadAttention(
        8, num_kv_heads=4, decode=True, rotary=Rotary(), capture=Capture(("entropy",))
    )

    def decode(variables: Any, x: jax.Array) -> Any:
        outs = []
        step = jax.jit(lambda v, x: layer.apply(v, x, mutable=["cache", "intermediates"]))
        for t in range(0, 16, 8):
            out, new = step(variables, x[:, t : t + 8])
            variables = variables | {"cache": new["cache"]}
            outs.append(jax.device_get((out, new["intermediates"])))
        return outs, variables["cache"]

    wanted, _ = decode(layer.init(KEY, X), X)
    mesh, leave = on(kind)
    try:
        variables = sharding.init(layer, KEY, X)
        got, cache = decode(variables, jax.device_put(X, NamedSharding(mesh, P("data"))))
    finally:
        leave()
    assert tuple(cache["kv"].key.sharding.spec)[:2] == ("data", "model")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_layer_inside_user_shard_map_matches_one_device(kernel: str, kind: str) -> None:
    layer = MultiHeadAttention(4, kernel=kernel, sinks=True, mask=masks.Causal())
    params = layer.init(KEY, X)

    def attend(params: Any, x: jax.Array) -> jax.Array:
        apply = layer.apply
        if not jax.sharding.get_abstract_mesh().empty:
            apply = jax.shard_map(apply, in_specs=(P(), P("data")), out_specs=P("data"))
        return apply(params, x)

    def loss(params: Any, x: jax.Array) -> Any:
        return jnp.sum(jnp.sin(attend(params, x)))

    wanted = jax.grad(loss, (0, 1))(params, X)
    mesh, leave = on(kind)
    try:
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        got = jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(params, x))
    finally:
        leave()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) < BACKWARD


MISUSES: dict[str, tuple[Any, tuple[int, ...], int, str]] = {
    "an axis that the mesh lacks": (
        changed(heads="tensor"), (2, 4), 8,
        r"rule \('heads', 'tensor'\) names the mesh axis \['tensor'\], and the mesh has "
        r"\{'data': 2, 'model': 4\}; make it with that axis",
    ),
    "heads": (
        sharding.RULES, (1, 8), 6,
        r"'heads' counts 6, which does not divide over the 8 devices of the mesh axis 'model'; "
        r"choose a multiple of 8, or another axis",
    ),
    "rows": (sharding.RULES, (8, 1), 8, r"'batch' counts 4, which does not divide over the 8"),
    "twice": (
        changed(heads="data"), (2, 4), 8,
        r"'heads' is to be sharded over 'data', which another axis of the same array",
    ),
    "groups": (
        changed(kv_heads="data", batch=None), (2, 4), 8,
        r"heads are sharded over 'model' and key/value heads over 'data'; give both the same",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, *MIXED])
@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises(name: str, kind: str) -> None:
    rules, shape, heads, message = MISUSES[name]
    layer = MultiHeadAttention(heads, qkv_features=48 if heads == 6 else None)
    params = jax.eval_shape(layer.init, KEY, X)
    _, leave = on(kind, rules, shape)
    try:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(layer.apply, params, X)
    finally:
        leave()


def test_explicit_axes_need_rules_for_sharded_inputs() -> None:
    layer = MultiHeadAttention(8)
    params = layer.init(KEY, X)
    expected = layer.apply(params, X)
    mesh, leave = on("Explicit", ())
    try:
        # Nothing is sharded: no rules are needed.
        np.testing.assert_allclose(jax.jit(layer.apply)(params, X), expected, atol=1e-5)
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"Explicit mesh axes .* need logical axis rules; "):
            jax.jit(layer.apply)(params, x)
        # The function reads the sharding from its arrays.
        q = jax.device_put(X.reshape(B, 16, 8, 4), NamedSharding(mesh, P("data", None, "model")))
        out = jax.jit(dot_product_attention)(q, q, q)
        assert out.sharding.spec == P("data", None, "model", None)
    finally:
        leave()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "S"), [(0, 0), (0, 4), (4, 0)])
def test_empty_queries_or_keys_on_meshes(T: int, S: int, kind: str) -> None:
    """In a sharded sequence too, where each device has none of them."""
    q, k = jnp.ones((B, T, 4, H)), jnp.ones((B, S, 4, H))

    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, k, mask=masks.Causal())

    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.sum(attend(q, k))

    _, leave = on(kind, changed(batch=None, length="data"))
    try:
        out, gradients = jax.device_get(
            jax.jit(lambda q, k: (attend(q, k), jax.grad(loss, (0, 1))(q, k)))(q, k)
        )
    finally:
        leave()
    assert out.shape == q.shape
    assert not any(x.any() for x in (out, *gradients))
