"""In a `jax.shard_map` over some axes of a mesh, the others are sharded by the rules."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import MultiHeadAttention, masks, sharding
from flax_mha.positions import Rotary
from tests.kernels.cases import pairs
from tests.support.meshes import BACKWARD, KEY, KINDS, X, changed, on
from tests.support.oracle import error, random_like

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
    params, wanted = on_one_device()
    mesh, leave = on(kind, rules, (2, 4) if manual == "data" else (4, 2))
    try:
        params = jax.device_put(params, NamedSharding(mesh, P()))
        x = jax.device_put(X, NamedSharding(mesh, P(manual)))
        got = jax.device_get(jax.jit(by_hand(model, manual, check_vma, inside))(params, x))
    finally:
        leave()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) < BACKWARD
