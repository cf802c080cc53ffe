"""Eager calls: the second call, with other values of the same shapes, compiles nothing.

JAX compiles a loop or a branch anew at each call if its function is made in the call, and keeps all
programs in memory.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import (
    Capture,
    KVCache,
    MultiHeadAttention,
    dot_product_attention,
    masks,
    positions,
    scores,
    variants,
)
from tests.support.programs import compiled

_seeds = itertools.count()


def compilations(call: Callable[[], Any], times: int = 1) -> int:
    """Return the number of compilations of calls after the second."""
    for _ in range(2):
        jax.block_until_ready(call())
    with compiled() as programs:
        for _ in range(times):
            jax.block_until_ready(call())
        return len(programs)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(next(_seeds)).normal(size=shape), jnp.float32)


def integers(*shape: int, most: int = 8) -> jax.Array:
    return jnp.asarray(np.random.default_rng(next(_seeds)).integers(1, most, shape), jnp.int32)


def attend(T: int = 8, **options: Any) -> Callable[[], Any]:
    """Return a call of attention. Options that are functions make a new value in each call."""

    def call() -> Any:
        made = {name: x() if callable(x) else x for name, x in options.items()}
        qkv = normal(2, T, 4, 8), normal(2, T, 2, 8), normal(2, T, 2, 8)
        return dot_product_attention(*qkv, **made)

    return call


def lower_triangle(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j <= i


def cache(**options: Any) -> KVCache:
    return KVCache.empty((2,), 96, 2, 8, **options).append(normal(2, 5, 2, 8), normal(2, 5, 2, 8))


def extend(T: int, **options: Any) -> Any:
    made = normal(2, T, 4, 8), normal(2, T, 2, 8), normal(2, T, 2, 8)
    return cache(**options).extend(*made, integers(2, most=T + 1))


CAUSAL, FINE = masks.Causal(), Capture(("weights", "scores", "lse", "entropy", "max_logit"))
CALLS: dict[str, Callable[[], Any]] = {
    "capture": attend(mask=CAUSAL, capture=FINE),
    "extend by a token": lambda: extend(1),
    "bias": attend(bias=lambda: normal(1, 4, 8, 8), return_weights=True),
    "scores": attend(scores=(scores.Alibi(), scores.SoftCap(5.0)), sinks=lambda: normal(4)),
    "dropout": attend(dropout_rate=0.5, dropout_rng=lambda: jax.random.key(next(_seeds))),
    "table": attend(mask=lambda: normal(2, 1, 8, 8) > 0, return_residuals=True),
    "positions": attend(mask=CAUSAL, q_positions=lambda: integers(8)),
    "long": attend(300, mask=CAUSAL, kernel="blockwise"),
    "long checkpointed": attend(300, mask=CAUSAL, kernel="checkpointed"),
    "long user-defined": attend(300, mask=masks.Predicate(lower_triangle), kernel="checkpointed"),
    "long capture": attend(600, mask=CAUSAL, capture=Capture(("entropy", "max_logit"))),
    "user-defined mask": attend(300, mask=masks.Predicate(lower_triangle)),
    "extend int8": lambda: extend(1, dtype=jnp.int8),
    "extend by a prompt": lambda: extend(70),
    "extend a ring buffer": lambda: extend(1, window=16),
    "fork": lambda: cache().fork(integers(3, most=2)),
    "truncate": lambda: cache().truncate(integers(2)),
}  # fmt: skip


@pytest.mark.sampled(0.024)
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_attention_compile_nothing_again(name: str) -> None:
    assert compilations(CALLS[name]) == 0


LAYERS: dict[str, MultiHeadAttention] = {
    "layer": MultiHeadAttention(4, num_kv_heads=2, rotary=positions.Rotary()),
    "Forgetting": variants.ForgettingAttention(4),
    "Differential": variants.DifferentialAttention(4),
    "TalkingHeads": variants.TalkingHeadsAttention(4),
    "Latent": variants.MultiHeadLatentAttention(
        4, kv_rank=4, rope_dim=4, rotary=positions.Rotary()
    ),
    "ChosenBlocks": variants.ChosenBlocksAttention(4, block=4, count=2),
}


def steps(layer: MultiHeadAttention, D: int = 16) -> Callable[[], Any]:
    """Return a decoding step of a layer."""
    layer = layer.clone(decode=True)
    variables = layer.init(jax.random.key(0), normal(2, 80, D))
    held = [variables["cache"]]

    def step() -> Any:
        state = {"params": variables["params"], "cache": held[0]}
        out, new = layer.apply(state, normal(2, 1, D), mutable="cache")
        held[0] = new["cache"]
        return out

    return step


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_their_steps_compile_nothing_again(name: str) -> None:
    layer = LAYERS[name]
    variables = layer.init(jax.random.key(0), normal(2, 8, 16))
    assert compilations(lambda: layer.apply(variables, normal(2, 8, 16), mask=CAUSAL)) == 0
    assert compilations(steps(layer), times=60 if name == "layer" else 1) == 0


@pytest.mark.sampled(0.08)
def test_an_nnx_layer_compiles_nothing_again() -> None:
    layer = flax_mha.nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0))

    def begin() -> Any:
        layer.init_cache((2, 64, 16))
        return layer(normal(2, 3, 16), decode=True)

    assert compilations(begin) == 0
    assert compilations(lambda: layer(normal(2, 1, 16), decode=True)) == 0
