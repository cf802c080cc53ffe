"""Stacks of several blocks in turn: layers that differ, in a loop and under `scan`."""

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
from tests.support.decoded import greedy
from tests.support.oracle import error, random_like

N, D, T = 4, 16, 9
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)
KEY = jax.random.key(0)


def blocks(kind: Any = EncoderBlock) -> tuple[Any, ...]:
    """As in today's models: windows, a layer that sees all, and one without positions."""
    local = MultiHeadAttention(N, mask=masks.Window(2, 0), rotary=Rotary(100.0), head_dim=4)
    whole = MultiHeadAttention(N, num_kv_heads=2, rotary=Rotary(1e4), head_dim=4)
    bare = MultiHeadAttention(N, head_dim=4, mask=masks.Window(4, 0))
    return kind(local, 32), kind(whole, 8, gated=True), kind(bare, 32, norm="rmsnorm")


def stacked(params: Any, layers: int, several: int) -> Any:
    """The parameters of a loop as those of a scan."""
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


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("layers", [6, 8])
def test_in_turn(layers: int) -> None:
    """The loop is the blocks one by one, and the scan is the loop, gradients too."""
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
    found, _ = gradient(together, scan)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, found, wanted)


@pytest.mark.parametrize("scan", [False, True])
def test_what_each_layer_has_of_its_own(scan: bool) -> None:
    """A head_mask each, also where some layers are left over after the last step."""
    stack = Encoder(4, blocks(), scan=scan)
    params = random_like(jax.eval_shape(stack.init, KEY, X))
    keep = [jnp.ones(N)] * 4
    apply = jax.jit(stack.apply)
    whole = apply(params, X, head_mask=keep)
    assert error(whole, apply(params, X)) < 1e-6
    for i in range(4):
        pruned = [x.at[i % N].set(0) if n == i else x for n, x in enumerate(keep)]
        assert error(apply(params, X, head_mask=pruned), whole) > 1e-4


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("scan", [False, True])
def test_decoding(scan: bool) -> None:
    """Rings for the windows, all tokens for the rest: token by token what the whole gives."""
    model = LanguageModel(TokenEmbedding(50, D), Decoder(5, blocks(DecoderBlock), scan=scan))
    tokens = np.random.default_rng(1).integers(0, 50, (2, T))
    params = random_like(jax.eval_shape(model.init, KEY, tokens))
    found = flax_mha.generate(model, params, tokens[:, :3], max_new_tokens=5)
    wanted = greedy(functools.partial(model.apply, params), tokens[:, :3], 5)
    np.testing.assert_array_equal(found.tokens, wanted)


def test_positions_that_no_layer_reads() -> None:
    stack = Encoder(2, (blocks()[2],))
    with pytest.raises(ValueError, match="rotary is None"):
        stack.init(KEY, X, positions=np.arange(T))


@pytest.mark.parametrize("block", [(), (blocks()[0], None), "gelu"])
def test_what_is_no_block(block: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="block must be"):
        Encoder(2, block).init(KEY, X)


def test_a_list_of_blocks() -> None:
    assert hash(Encoder(3, [*blocks()])) == hash(Encoder(3, blocks()))
