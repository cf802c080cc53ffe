"""The same results on every mesh: none, Auto axes, Explicit axes, inside jax.shard_map."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import MultiHeadAttention, dot_product_attention, masks, scores, sharding
from flax_mha.positions import Rotary
from tests.kernels.cases import KERNELS, pairs
from tests.support.arrays import ones
from tests.support.meshes import (
    BACKWARD,
    KEY,
    KINDS,
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
from tests.support.oracle import error, random_like


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
            "mask": masks.Lengths(np.array([3, 50, 0, 70])), "dropout_rate": 0.3,
            "dropout_rng": KEY,
        },
        sharding.RULES,
    ),
    "functions of rows and heads": (
        4,
        {
            "mask": masks.Segments(IDS)
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
@pytest.mark.sampled(0.009)
@pytest.mark.parametrize(
    ("name", "kernel", "kind"), pairs(name=(*CALLS,), kernel=KERNELS, kind=(*KINDS,))
)
def test_kernels_on_meshes_match_one_device(name: str, kernel: str, kind: str) -> None:
    K, call, rules = CALLS[name]
    q, k, v = (RNG.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K))
    bias, sinks = RNG.normal(size=(N, T, T)).astype(np.float32), np.arange(N, dtype=np.float32)

    def attend(q, k, v, bias, sinks):
        out, lse = dot_product_attention(
            q, k, v, kernel=kernel, bias=bias, sinks=sinks, return_residuals=True, **call
        )
        return out, lse

    compare(attend, (q, k, v, bias, sinks), kind, rules, [P()] * 5)


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("kind", KINDS)
def test_one_array_as_sinks_and_argument(kind: str) -> None:
    """Sinks are sharded like heads, the same array as a function's argument is not."""
    q, each = RNG.normal(size=(B, 12, N, H)).astype(np.float32), np.arange(N, dtype=np.float32)

    def attend(q, each):
        score = scores.Score(lambda s, b, n, i, j, x: s * jnp.take(x, n), (each,))
        return dot_product_attention(q, q, q, scores=(score,), sinks=each)

    compare(attend, (q, each), kind, sharding.RULES, [P("data"), P()])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_layer_inside_user_shard_map_matches_one_device(kernel: str, kind: str) -> None:
    layer = MultiHeadAttention(4, kernel=kernel, sinks=True, mask=masks.Causal())
    params = random_like(jax.eval_shape(layer.init, KEY, X))

    def mapped(params: Any, x: jax.Array) -> jax.Array:
        apply = jax.shard_map(layer.apply, in_specs=(P(), P("data")), out_specs=P("data"))
        return apply(params, x)

    specs = [P(), P("data")]
    compare(mapped, (params, X), kind, sharding.RULES, specs, alone=layer.apply)


def test_explicit_axes_need_rules_for_sharded_inputs() -> None:
    layer = MultiHeadAttention(8)
    params = jax.eval_shape(layer.init, KEY, X)
    with on("Explicit", ()) as mesh:

        def sharded(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, X.dtype, sharding=NamedSharding(mesh, P(*axes)))

        # Nothing is sharded: no rules are needed.
        assert jax.eval_shape(layer.apply, params, X).shape == X.shape
        with pytest.raises(ValueError, match=r"Explicit mesh axes .* need logical axis rules; "):
            jax.eval_shape(layer.apply, params, sharded(X.shape, "data"))
        # The function reads the sharding from its arrays.
        q = sharded((B, 16, 8, 4), "data", None, "model")
        out = jax.eval_shape(dot_product_attention, q, q, q)
        assert out.sharding.spec == P("data", None, "model", None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "S"), [(0, 0), (0, 4), (4, 0)])
def test_empty_queries_or_keys_on_meshes(T: int, S: int, kind: str) -> None:
    """In a sharded sequence too, where each device has none of them."""
    q, k = ones((B, T, 4, H)), ones((B, S, 4, H))

    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, k, mask=masks.Causal())

    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.sum(attend(q, k))

    with on(kind, changed(batch=None, length="data")):
        out, gradients = jax.device_get(
            jax.jit(lambda q, k: (attend(q, k), jax.grad(loss, (0, 1))(q, k)))(q, k)
        )
    assert out.shape == q.shape
    assert not any(x.any() for x in (out, *gradients))


# Without biases: the softmax cancels the key bias, so its gradient is 0.
LAYER = MultiHeadAttention(8, num_kv_heads=4, use_bias=False, mask=masks.Causal(), rotary=Rotary())
SWAPPED = changed(batch="model", heads="data", kv_heads="data", mlp="data", vocab="data")


@functools.cache
def on_one_device() -> tuple[Any, Any]:
    """Return parameters, and the gradients of parameters and inputs."""
    params = random_like(jax.eval_shape(LAYER.init, KEY, X))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(LAYER.apply(params, x)))

    return params, jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(params, X))


PARTLY = {
    f"{manual} Manual, the other {kind}": (manual, kind)
    for manual in ("data", "model")
    for kind in KINDS
}


def by_hand(model: nn.Module, manual: str, check_vma: bool, inside: bool) -> Any:
    """Return a function for the gradients of a loss with rows sharded by the caller over one
    axis.
    """

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(model.apply(params, x)))

    def local(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.psum(loss(params, x), manual)

    def gradients(params: Any, x: jax.Array) -> Any:
        if check_vma:
            params = jax.tree.map(lambda w: jax.lax.pcast(w, (manual,), to="varying"), params)
        dparams, dx = jax.grad(loss, (0, 1))(params, x)
        return jax.lax.psum(dparams, manual), dx

    ins = P(), P(manual)
    share = functools.partial(jax.shard_map, in_specs=ins, axis_names={manual}, check_vma=check_vma)
    if inside:
        return share(gradients, out_specs=ins)
    return jax.grad(share(local, out_specs=P()), (0, 1))


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("case", PARTLY)
def test_partly_manual_axes_trace(case: str, check_vma: bool, inside: bool) -> None:
    """In a `jax.shard_map` over some axes, the others shard heads as the rules say."""
    manual, kind = PARTLY[case]
    rules = sharding.RULES if manual == "data" else SWAPPED
    params = jax.eval_shape(LAYER.init, KEY, X)
    with on(kind, rules, (2, 4) if manual == "data" else (4, 2)) as mesh:
        x = jax.device_put(X, NamedSharding(mesh, P(manual)))
        got = jax.eval_shape(by_hand(LAYER, manual, check_vma, inside), params, x)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, (params, X))


# All pairs of these occur; their whole product is traced above.
BY_HAND = pairs(
    case=(*PARTLY,), check_vma=(False, True), inside=(False, True),
    kernel=("reference", "blockwise"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("case", "check_vma", "inside", "kernel"), BY_HAND)
def test_partly_manual_axes_match_one_device(
    case: str, check_vma: bool, inside: bool, kernel: str
) -> None:
    manual, kind = PARTLY[case]
    rules = sharding.RULES if manual == "data" else SWAPPED
    model = LAYER.clone(kernel=kernel)
    params, wanted = on_one_device()
    with on(kind, rules, (2, 4) if manual == "data" else (4, 2)) as mesh:
        params = jax.device_put(params, NamedSharding(mesh, P()))
        x = jax.device_put(X, NamedSharding(mesh, P(manual)))
        got = jax.device_get(jax.jit(by_hand(model, manual, check_vma, inside))(params, x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) < BACKWARD
