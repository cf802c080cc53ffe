"""Stacks of alternating blocks: layers that differ, in a loop and under `scan`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import Encoder, EncoderBlock, MultiHeadAttention, masks
from flax_mha.positions import Rotary
from tests.support.arrays import random_variables
from tests.support.oracle import error

N, D, T = 4, 16, 9
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)
KEY = jax.random.key(0)


def blocks() -> tuple[EncoderBlock, ...]:
    """Build three blocks as in current models: a window, full attention, and one without
    positions.
    """
    local = MultiHeadAttention(N, mask=masks.Window(2, 0), rotary=Rotary(100.0), head_dim=4)
    whole = MultiHeadAttention(N, num_kv_heads=2, rotary=Rotary(1e4), head_dim=4)
    bare = MultiHeadAttention(N, head_dim=4, mask=masks.Window(4, 0))
    other = EncoderBlock(whole, 8, gated=True)
    return EncoderBlock(local, 32), other, EncoderBlock(bare, 32, norm="rmsnorm")


def stacked(params: Any, layers: int, several: int) -> Any:
    """Convert the parameters of a loop for a scan."""
    steps = layers // several
    found = {}
    for name, tree in params.items():
        if not name.startswith("layers_") or int(name[7:]) >= steps * several:
            found[name] = tree
    for n in range(several):
        each = [params[f"layers_{i * several + n}"] for i in range(steps)]
        whole = jax.tree.map(lambda *x: np.stack(x), *each)
        found.setdefault("layers", {})[f"block_{n}"] = whole
    return found


@pytest.mark.sampled(0)
@pytest.mark.parametrize("layers", [6, 8])
def test_alternating_blocks_match_their_sequence(layers: int) -> None:
    """The loop equals the blocks one by one, the scan equals the loop, gradients included."""
    loop, scan = (Encoder(layers, blocks(), scan=scan, final_norm=False) for scan in (False, True))
    params = random_variables(loop, X)["params"]
    at = 3 * np.arange(T)
    expected, several = X, [(block, jax.jit(block.apply)) for block in blocks()]
    for i in range(layers):
        block, apply = several[i % 3]
        where = {} if block.attention.rotary is None else {"positions": at}
        expected = apply({"params": params[f"layers_{i}"]}, expected, **where)

    together = stacked(params, layers, 3)
    shapes = jax.eval_shape(scan.init, KEY, X)["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, together)

    def loss(params: Any, stack: Encoder) -> tuple[jax.Array, jax.Array]:
        out = stack.apply({"params": params}, X, positions=at)
        return jnp.sum(jnp.sin(out)), out

    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    wanted, out = gradient(params, loop)
    assert error(out, expected) < 1e-6
    wanted = stacked(wanted, layers, 3)
    actual, _ = gradient(together, scan)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, actual, wanted)


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("scan", [False, True])
def test_each_layer_takes_its_own_head_mask(scan: bool) -> None:
    """Also with layers left over after the last scan step."""
    stack = Encoder(4, blocks(), scan=scan)
    params = random_variables(stack, X)
    keep = [jnp.ones(N)] * 4
    apply = jax.jit(stack.apply)
    whole = apply(params, X, head_mask=keep)
    assert error(whole, apply(params, X)) < 1e-6
    for i in range(4):
        pruned = [x.at[i % N].set(0) if n == i else x for n, x in enumerate(keep)]
        assert error(apply(params, X, head_mask=pruned), whole) > 1e-4
    with pytest.raises(ValueError, match="a list of one for each of the 4 blocks, got 3"):
        jax.eval_shape(stack.apply, params, X, head_mask=keep[:3])
