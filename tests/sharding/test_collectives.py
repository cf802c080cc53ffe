"""Collectives of layers and context-parallel strategies, counted in compiled programs."""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.plan.collectives import read
from flax_mha import MultiHeadAttention, dot_product_attention, masks, sharding
from flax_mha.positions import Rotary
from flax_mha.sharding import products
from tests.sharding.test_sharded_models import FSDP, ROWS
from tests.support.meshes import EIGHT, GROUPED, KINDS, B, H, N, X, collectives, described, on

T = 64


# Key/value heads, and the rules and the mesh of heads over 8 devices. A device has one key/value
# head, or there is only one, which is replicated.
HEADS: dict[int, tuple[Any, tuple[int, ...]]] = {
    8: (sharding.RULES, (1, 8)), 4: (GROUPED, (1, 4, 2)), 2: (GROUPED, (1, 2, 4)),
    1: (sharding.RULES, (1, 8)),
}  # fmt: skip


@pytest.mark.sampled(0.03)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("K", "kernel"), [(8, "reference"), *((K, "blockwise") for K in HEADS)])
def test_sharded_heads_need_one_all_reduce(optimized: None, K: int, kernel: str, kind: str) -> None:
    """It sends B·T·D forward, and nothing else.

    Backward XLA for CPUs sums the gradients of queries, keys and values one by one, unlike the
    compilers for TPUs and GPUs (`test_tpu_collectives.py`). Devices that share a key/value head sum
    its gradients, and those of its kernels.
    """
    rules, shape = HEADS[K]
    layer = MultiHeadAttention(
        8, num_kv_heads=K, kernel=kernel, mask=masks.Causal(), rotary=Rotary()
    )

    def loss(params, x):
        return jnp.sum(jnp.sin(layer.apply(params, x)))

    with on(kind, rules, shape):
        params = described(layer, X)
        forward = jax.jit(layer.apply).lower(params, X).compile().as_text()
        both = jax.jit(jax.grad(loss, (0, 1))).lower(params, X).compile().as_text()
    BTD, D, T = 4 * X.size, X.shape[-1], X.shape[1]
    assert collectives(forward) == [("all-reduce", BTD)]
    found = read(both, devices=8)
    assert {one.kind for one in found} == {"all-reduce"}
    everywhere = [one.bytes for one in found if one.groups.shape == (1, 8)]
    of_group = [one.bytes for one in found if one.groups.shape == (K, 8 // K) != (1, 8)]
    assert len(everywhere) + len(of_group) == len(found)
    assert sum(everywhere) == (4 * BTD if K > 1 else 2 * BTD + 2 * 4 * B * T * H)
    assert sum(of_group) == (4 * 2 * H * (B * T + D) if K in (2, 4) else 0)


@pytest.mark.skipif(not products.SHARDED_SUBGROUPS, reason="left to XLA before jaxlib 0.11.2")
@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_reduce_scattered(optimized: None, kind: str) -> None:
    """Over d = m = f = 2 devices for rows, heads and features, P the kernels' bytes:

    all-gathers of P/m, reduce-scatters to P/(m·f), all-reduces of these over d. No gathered kernel
    is kept: the gradient of the heads' outputs gathers the last kernel again.
    """
    d, m, f = 2, 2, 2
    layer = MultiHeadAttention(8, use_bias=False)
    with on(kind, FSDP, (d, m, f)) as mesh:
        x = jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)
        params = described(layer, x)
        places = jax.tree.map(lambda x: x.sharding, params)

        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(layer.apply(params, x)))

        x = x.update(sharding=NamedSharding(mesh, P(ROWS)))
        gradient = jax.jit(jax.grad(loss), out_shardings=places)
        text = gradient.lower(params, x).compile().as_text()
    kernels = 4 * sum(math.prod(w.shape) for w in jax.tree.leaves(params))
    of_output = 4 * math.prod(params["params"]["out"]["kernel"].shape)
    sent: Counter[str] = Counter()
    for collective, size in collectives(text):
        sent[collective] += size
    output = 4 * x.size // (d * f)  # The gradient of x is not asked for.
    assert sent == {
        "all-gather": (kernels + of_output) // m,
        "reduce-scatter": kernels // (m * f),
        "all-reduce": kernels // (m * f) + output,
    }


def test_loss_over_sharded_vocabulary_gathers_no_logits(optimized) -> None:
    logits = jax.ShapeDtypeStruct((B, 6, 64), jnp.float32)
    labels = np.ones((B, 6), int)

    def loss(logits: jax.Array) -> jax.Array:
        logits = sharding.constrain(logits, ("batch", "length", "vocab"))
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 64)).mean()

    with on("Auto", shape=(1, 8)):
        text = jax.jit(jax.grad(loss)).lower(logits).compile().as_text()
    found = collectives(text)
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert sum(size for _, size in found) <= 4 * 3 * B * 6


def program(
    way: str, mask: masks.Mask | None, K: int, *, grad: bool, dtype: str = "float32"
) -> list[tuple[str, int]]:
    """Return the collectives for heads of 8 features over 4 devices, forward or both ways."""

    def attend(*qkv):
        return dot_product_attention(*qkv, mask=mask, kernel=way)

    def backward(q, k, v, dout):
        return jax.vjp(attend, q, k, v)[1](dout)

    with on("Auto", EIGHT) as mesh:
        placed = NamedSharding(mesh, P("data", "model"))
        q, k = (jax.ShapeDtypeStruct((B, T, n, 8), dtype, sharding=placed) for n in (N, K))
        fn, args = (backward, (q, k, k, q)) if grad else (attend, (q, k, k))
        text = jax.jit(fn, out_shardings=placed).lower(*args).compile().as_text()
    return collectives(text)


def sent(found: list[tuple[str, int]], kind: str) -> int:
    assert {name for name, _ in found} <= {kind}
    return sum(size for _, size in found)


@pytest.mark.slow
def test_ring_sends_each_block_once_around(optimized: None) -> None:
    """(n−1)/n of keys and values forward, twice that backward, less if the mask skips hops."""
    n, K = 4, 2
    rows = B // 2
    keys_and_values = 2 * 4 * rows * T * K * 8
    once = keys_and_values * (n - 1) // n
    assert sent(program("ring", masks.Causal(), K, grad=False), "collective-permute") == once
    assert sent(program("ring", None, K, grad=True), "collective-permute") == 3 * once
    # Float16 halves the keys and values but not the gradients: a ring sums them in float32.
    halves = program("ring", None, K, grad=True, dtype="float16")
    assert sent(halves, "collective-permute") == 2 * once


@pytest.mark.sampled(0.08)
def test_all_gather_sends_all_keys_and_values(optimized: None) -> None:
    """Each device ends with all of them. Their gradients are summed in float32."""
    K = 2
    whole = 2 * 4 * (B // 2) * T * K * 8
    assert sent(program("all_gather", masks.Causal(), K, grad=False), "all-gather") == whole
    both = program("all_gather", masks.Causal(), K, grad=True)
    back = [found for found in both if found[0] != "all-gather"]
    assert sum(size for _, size in both) == 2 * whole
    # XLA:CPU uses an all-reduce here instead of a reduce-scatter.
    assert sent(back, "all-reduce") == whole
    halves = program("all_gather", masks.Causal(), K, grad=True, dtype="float16")
    assert sent([found for found in halves if found[0] == "all-gather"], "all-gather") == whole // 2
    assert sent([found for found in halves if found[0] != "all-gather"], "all-reduce") == whole


@pytest.mark.sampled(0.08)
def test_ulysses_sends_queries_keys_values_and_output(optimized: None) -> None:
    """XLA counts a device's own part too. The backward pass sends as much again."""
    whole = 4 * (B // 2) * T * (2 * N + 2 * 4) * 8 // 4
    assert sent(program("ulysses", masks.Causal(), 4, grad=False), "all-to-all") == whole
    both = sent(program("ulysses", masks.Causal(), 4, grad=True), "all-to-all")
    assert whole < both <= 2 * whole
