"""Meshes that mix Auto, Explicit and Manual axes."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import Encoder, EncoderBlock, MultiHeadAttention, masks, sharding
from flax_mha.positions import Rotary
from tests.kernels.cases import pairs
from tests.support.meshes import BACKWARD, EIGHT, FORWARD, FOUR, KEY, KINDS, MIXED, X, changed, on
from tests.support.oracle import error

# Without biases: the softmax cancels the key bias, so its gradient is 0.
LAYER = MultiHeadAttention(8, num_kv_heads=4, use_bias=False, mask=masks.Causal(), rotary=Rotary())
SWAPPED = changed(batch="model", heads="data", kv_heads="data", mlp="data", vocab="data")
ENCODER = Encoder(1, EncoderBlock(LAYER, 64, dropout_rate=0.1))
CASES: dict[str, tuple[nn.Module, Any]] = {
    "layer": (LAYER, sharding.RULES),
    "encoder": (ENCODER, changed(embed="data")),
    "heads and context": (LAYER, FOUR),
    "rows and context": (LAYER, EIGHT),
}


def gradients(model: nn.Module, params: Any, x: jax.Array) -> Any:
    def loss(params: Any, x: jax.Array) -> Any:
        y = model.apply(params, x, deterministic=False, rngs={"dropout": KEY})
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)


@functools.cache
def on_one_device(model: nn.Module) -> tuple[Any, Any]:
    """Return parameters, and the gradients and output."""
    params = jax.jit(functools.partial(model.init, deterministic=True))(KEY, X)
    return params, gradients(model, params, X)


def check(got: Any, wanted: Any) -> None:
    """Check that gradients and output match the results of one device."""
    assert error(got[1], wanted[1]) < FORWARD
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(wanted[0]), strict=True):
        assert error(a, b) < BACKWARD


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("name", CASES)
def test_auto_and_explicit_axes_match_one_device(name: str, kind: str) -> None:
    model, rules = CASES[name]
    _, wanted = on_one_device(model)
    mesh, leave = on(kind, rules)
    try:
        params = sharding.init(model, KEY, X, deterministic=True)
        placed = jax.device_put(X, NamedSharding(mesh, P("data")))
        got = jax.device_get(gradients(model, params, placed))
    finally:
        leave()
    check(got, wanted)


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


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("case", PARTLY)
def test_partly_manual_axes_trace(case: str, check_vma: bool, inside: bool) -> None:
    """In a `jax.shard_map` over some axes, the others shard heads as the rules say."""
    manual, kind = PARTLY[case]
    rules = sharding.RULES if manual == "data" else SWAPPED
    params = jax.eval_shape(LAYER.init, KEY, X)
    mesh, leave = on(kind, rules, (2, 4) if manual == "data" else (4, 2))
    try:
        x = jax.device_put(X, NamedSharding(mesh, P(manual)))
        got = jax.eval_shape(by_hand(LAYER, manual, check_vma, inside), params, x)
    finally:
        leave()
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
    params, (wanted, _) = on_one_device(LAYER)
    mesh, leave = on(kind, rules, (2, 4) if manual == "data" else (4, 2))
    try:
        params = jax.device_put(params, NamedSharding(mesh, P()))
        x = jax.device_put(X, NamedSharding(mesh, P(manual)))
        got = jax.device_get(jax.jit(by_hand(model, manual, check_vma, inside))(params, x))
    finally:
        leave()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) < BACKWARD


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_partly_manual_axes_work_outside_jit(kind: str) -> None:
    params, (_, wanted) = on_one_device(LAYER)
    mesh, leave = on(kind)
    try:
        share = jax.shard_map(
            LAYER.apply, in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"}
        )
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        got = jax.device_get(share(jax.device_put(params, NamedSharding(mesh, P())), x))
    finally:
        leave()
    assert error(got, wanted) < FORWARD
