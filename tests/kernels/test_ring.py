"""Kernels on a ring: what each step is given, and what it computes."""

import functools
import importlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import dot_product_attention, explain
from flax_mha.kernels.registry import KERNELS
from flax_mha.masks import Causal, Segments, Window
from flax_mha.scores import RelativeBias
from tests.kernels.near import close as near
from tests.kernels.test_flex import close

RULES = (("length", "model"), ("heads", None), ("kv_heads", None), ("batch", None))
# What computes attention forward: its module, and its name.
FORWARD = {"flex": ("flex.core", "_attend"), "blockwise": ("blockwise", "_loops")}


@pytest.mark.slow
def test_on_a_ring(tpu) -> None:
    """Each step's gradients are those of what all of them gave."""
    rng = np.random.default_rng(4)
    sizes = [(1, 256, 2, 8)] * 3 + [(2, 32)]
    args = [jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes]
    mask = Causal() & Segments(np.repeat(np.arange(2), 128)[None] // 2)

    def pull(kernel):
        def loss(q, k, v, table):
            out, lse = dot_product_attention(
                q, k, v, mask=mask, scores=(RelativeBias(table),), kernel=kernel,
                return_residuals=True,
            )  # fmt: skip
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*args)

    expected = pull("reference")
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        close(pull("ring:flex"), expected)


def forwards(kernel: str, n: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often n devices compute attention of a block forward, for out and its gradients."""
    runs = []
    place, name = FORWARD[kernel]
    module = importlib.import_module(f"flax_mha.kernels.{place}")
    computed = getattr(module, name)

    def counted(*args: Any) -> Any:
        jax.debug.callback(lambda: runs.append(1))
        return computed(*args)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def pull(*qkv: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(dot_product_attention(*qkv, mask=Causal(), kernel=f"ring:{kernel}")))

    mesh = jax.make_mesh((1, n), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES), monkeypatch.context() as patch:
        patch.setattr(module, name, counted)
        jax.block_until_ready(pull(*[jnp.ones((1, 16 * n, 1, 8))] * 3))
        jax.effects_barrier()
    return len(runs)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "n"), [("flex", 2), ("blockwise", 8)])
def test_the_backward_pass_computes_no_attention_again(
    tpu, kernel: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a causal mask each device has a block for itself and each before it, once."""
    blocks = n * (n + 1) // 2
    assert forwards(kernel, n, monkeypatch) == blocks
    # A kernel that can't go on from what is known computes it again.
    monkeypatch.setitem(KERNELS, kernel, KERNELS[kernel]._replace(recalls=False))
    assert forwards(kernel, n, monkeypatch) == 2 * blocks


@pytest.mark.parametrize("mask", [Causal(), None], ids=["causal", "full"])
@pytest.mark.parametrize("sunk", [False, True])
def test_cudnn_on_a_ring(nvidia, mask, sunk: bool) -> None:
    """What a step needs is full, the diagonal, or nothing: no position is asked."""
    rng = np.random.default_rng(4)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 64, n, 8)), jnp.bfloat16) for n in (4, 2, 2))
    sinks = jnp.array([0.5, -1.0, 0.0, 1.0]) if sunk else None

    @functools.partial(jax.jit, static_argnums=0)
    def pull(kernel, *qkv):
        def loss(*qkv):
            out, lse = dot_product_attention(
                *qkv, mask=mask, sinks=sinks, kernel=kernel, return_residuals=True
            )
            return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse))

        return jax.value_and_grad(loss, (0, 1, 2))(*qkv)

    expected = pull("reference", q, k, v)
    mesh = jax.make_mesh((1, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        assert explain(q, k, v, mask=mask, sinks=sinks, kernel="ring").chosen == "cudnn"
        jax.tree.map(near, pull("ring:cudnn", q, k, v), expected)
        # Blocks that a window splits elsewhere than on the diagonal are not of one kind.
        refused = explain(q, k, v, mask=Causal() & Window(20), kernel="ring").refused["cudnn"]
        assert "q_positions do not count from one number" in refused
