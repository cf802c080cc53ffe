"""Stacks of alternating blocks: layers that differ, in a loop and under `scan`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_mha
from flax_mha import Decoder, DecoderBlock, Encoder, EncoderBlock, MultiHeadAttention, masks
from flax_mha.models import LanguageModel, TokenEmbedding
from flax_mha.positions import Rotary
from tests.support.decoding import greedy
from tests.support.oracle import error, random_like

N, D, T = 4, 16, 9
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)
KEY = jax.random.key(0)


def blocks(kind: Any = EncoderBlock) -> tuple[Any, ...]:
    """Build three blocks as in current models: a window, full attention, and one without
    positions.
    """
    local = MultiHeadAttention(N, mask=masks.Window(2, 0), rotary=Rotary(100.0), head_dim=4)
    whole = MultiHeadAttention(N, num_kv_heads=2, rotary=Rotary(1e4), head_dim=4)
    bare = MultiHeadAttention(N, head_dim=4, mask=masks.Window(4, 0))
    return kind(local, 32), kind(whole, 8, gated=True), kind(bare, 32, norm="rmsnorm")


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


@pytest.mark.sampled(0, slow=0.3)
@pytest.mark.parametrize("layers", [6, 8])
def test_alternating_blocks_match_their_sequence(layers: int) -> None:
    """The loop equals the blocks one by one, the scan equals the loop, gradients included."""
    loop, scan = (Encoder(layers, blocks(), scan=scan, final_norm=False) for scan in (False, True))
    params = random_like(jax.eval_shape(loop.init, KEY, X))["params"]
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


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("scan", [False, True])
def test_each_layer_takes_its_own_head_mask(scan: bool) -> None:
    """Also with layers left over after the last scan step."""
    stack = Encoder(4, blocks(), scan=scan)
    params = random_like(jax.eval_shape(stack.init, KEY, X))
    keep = [jnp.ones(N)] * 4
    apply = jax.jit(stack.apply)
    whole = apply(params, X, head_mask=keep)
    assert error(whole, apply(params, X)) < 1e-6
    for i in range(4):
        pruned = [x.at[i % N].set(0) if n == i else x for n, x in enumerate(keep)]
        assert error(apply(params, X, head_mask=pruned), whole) > 1e-4
    with pytest.raises(ValueError, match="a list of one for each of the 4 blocks, got 3"):
        jax.eval_shape(stack.apply, params, X, head_mask=keep[:3])


@pytest.mark.sampled(0, slow=0.3)
@pytest.mark.parametrize("scan", [False, True])
def test_decoding_matches_full_forward(scan: bool) -> None:
    """Rings for the windows, full caches for the other layers."""
    model = LanguageModel(TokenEmbedding(50, D), Decoder(5, blocks(DecoderBlock), scan=scan))
    tokens = np.random.default_rng(1).integers(0, 50, (2, T))
    params = random_like(jax.eval_shape(model.init, KEY, tokens))
    actual = flax_mha.generate(model, params, tokens[:, :3], max_new_tokens=5)
    expected = greedy(functools.partial(model.apply, params), tokens[:, :3], 5)
    np.testing.assert_array_equal(actual.tokens, expected)


def test_positions_without_rotary_raise() -> None:
    stack = Encoder(2, (blocks()[2],))
    with pytest.raises(ValueError, match="rotary is None"):
        jax.eval_shape(lambda: stack.init(KEY, X, positions=np.arange(T)))


@pytest.mark.parametrize("block", [(blocks()[0], None), "gelu"])
def test_invalid_blocks_raise(block: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="block must be"):
        jax.eval_shape(Encoder(2, block).init, KEY, X)
