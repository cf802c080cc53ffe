"""Stacks with layers that share keys and values: memory and errors."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha
from flax_mha import (
    CacheConfig,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    LanguageModel,
    MultiHeadAttention,
    QKNorm,
    masks,
    variants,
)
from flax_mha.models import TokenEmbedding
from flax_mha.positions import Rotary
from flax_mha.scores import SoftCap
from tests.support.arrays import random_variables
from tests.support.oracle import error

D, T = 16, 9
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, T, D)).astype(np.float32)
TOKENS = RNG.integers(0, 50, (2, T))


def blocks(kind: Any = DecoderBlock, narrow: int = 1, **fields: Any) -> tuple[Any, ...]:
    """Build a layer with a ring, one that sees all tokens, and a variant of each."""
    local = MultiHeadAttention(
        4, num_kv_heads=2, rotary=Rotary(100.0), mask=masks.Window(2, 0), cache=CacheConfig(slots=4)
    )
    whole = MultiHeadAttention(4, num_kv_heads=2, rotary=Rotary(1e4), qk_norm=QKNorm())
    others = (
        local.clone(mask=masks.Window(narrow, 0)),
        whole.clone(scores=(SoftCap(2.0),), cache=CacheConfig("int8")),
    )
    return tuple(kind(layer, 24, **fields) for layer in (local, whole, *others))


# Two layers share their keys and values, two use them.
MODEL = LanguageModel(TokenEmbedding(50, D), Decoder(4, blocks(), kv_from=(None, None, 0, 1)))


@functools.cache
def parameters() -> Any:
    return random_variables(MODEL, TOKENS)


def decoding(decoder: Decoder) -> Decoder:
    inner = (b.clone(attention=b.attention.clone(decode=True)) for b in decoder.blocks)
    return decoder.copy(block=tuple(inner))


def test_sharing_layers_hold_no_cache() -> None:
    """They have no parameters for keys and values, and no cache."""

    def kept(decoder: Decoder) -> dict[str, int]:
        held = jax.eval_shape(decoding(decoder).init, KEY, X)["cache"]
        return {
            name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
            for name, tree in held.items()
        }

    found, plain = kept(MODEL.decoder), kept(MODEL.decoder.copy(kv_from=None))
    assert found == {f"layers_{i}": plain[f"layers_{i}"] for i in range(2)}
    takers = parameters()["params"]["decoder"]["layers_3"]["attention"]
    assert takers.keys() == {"query", "query_ln", "out"}


@pytest.mark.sampled(0.08)
def test_stack_takes_keys_and_values_of_another_stack() -> None:
    """As in YOCO's cross-decoder."""
    block = EncoderBlock(MultiHeadAttention(4, mask=masks.Causal()), 8)
    later = Encoder(2, block, scan=True, final_norm=False)
    joined = Encoder(3, block, kv_from=(None, 0, 0), final_norm=False)
    params = random_variables(joined, X)["params"]
    alone = jax.jit(functools.partial(block.apply, return_kv=True))
    x, kv = alone({"params": params["layers_0"]}, X)
    layers = jax.tree.map(lambda *x: jnp.stack(x), params["layers_1"], params["layers_2"])
    found = jax.jit(later.apply)({"params": {"layers": layers}}, x, kv=kv)
    assert error(found, jax.jit(joined.apply)({"params": params}, X)) < 1e-6


def initialized(module: nn.Module, *inputs: Any, **call: Any) -> Any:
    return jax.eval_shape(functools.partial(module.init, **call), KEY, X, *inputs)


def stack(*table: Any, scan: bool = False, **call: Any) -> Any:
    block = blocks(EncoderBlock)[:1]
    return initialized(Encoder(len(table), block, kv_from=table, scan=scan), **call)


def take(kv: Any, *inputs: Any, **fields: Any) -> Any:
    call = fields.pop("call", {})
    layer = fields.pop("kind", MultiHeadAttention)(4, **{"head_dim": 4} | fields)
    return initialized(layer, *inputs, kv=kv, **call)


def in_a_ring() -> Any:
    """Run a step of a layer that sees more tokens than its shared ring holds."""
    wide = MODEL.copy(decoder=MODEL.decoder.copy(block=blocks(narrow=3)))
    return flax_mha.generate(wide, parameters(), TOKENS, max_new_tokens=2)


PAIR = (np.ones((2, T, 2, 4), np.float32),) * 2
VARIANTS: dict[Any, dict[str, Any]] = {
    variants.DifferentialAttention: {}, variants.ForgettingAttention: {},
    variants.TalkingHeadsAttention: {}, variants.ChosenBlocksAttention: {},
    variants.MultiHeadLatentAttention: {"rotary": Rotary(), "rope_dim": 2},
}  # fmt: skip
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "length": (lambda: initialized(Encoder(3, blocks(EncoderBlock), kv_from=(None, 0))),
               ValueError, r"for each of the 3 layers None, .* got \(None, 0\)"),
    **{name: (lambda table=table: stack(*table), ValueError, "of an earlier layer with None, got")
       for name, table in (("forwards", (None, 2, None)), ("itself", (None, 1)),
                           ("the first", (0, None)), ("of a taker", (None, 0, 1)),
                           ("negative", (None, -1)), ("a name", (None, "0")))},
    "scan": (lambda: stack(None, 0, scan=True), ValueError, "cannot be used with scan=True"),
    "table and kv": (lambda: stack(None, 0, kv=PAIR), ValueError, "cannot be used with .* or kv="),
    "inputs too": (lambda: take(PAIR, X), ValueError, "kv are keys and values themselves, got inp"),
    "order": (lambda: take(PAIR, call={"order": np.arange(T)}), ValueError,
              "order must be given to both layers"),
    "a ring": (lambda: in_a_ring(), ValueError, r"ring buffer with a window of 2, .* at most 2"),
    "torch": (lambda: flax_mha.interop.to_torch(
        Encoder(2, blocks(EncoderBlock)[0], kv_from=(None, 0)), {}
    ), ValueError, r"torch.nn has no Encoder with kv_from, got \(None, 0\)"),
    "nnx without": (lambda: flax_mha.nnx.MultiHeadAttention(
        4, D, in_kv_features=0, rngs=nnx.Rngs(0)
    )(X), ValueError, "in_kv_features=0 has no keys and values of its own; give kv="),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_invalid_sharing_raises(name: str) -> None:
    make, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        make()


@pytest.mark.parametrize("kind", VARIANTS)
def test_variants_do_not_share_keys_and_values(kind: Any) -> None:
    fields = VARIANTS[kind] | {"kind": kind}
    with pytest.raises(ValueError, match=r"got (inputs_k or )?kv; leave it out"):
        take(PAIR, **fields)
    if kind is not variants.ChosenBlocksAttention:  # Its keys and values are a standard layer's.
        with pytest.raises(ValueError, match="no keys and values that others could attend to"):
            take(None, call={"return_kv": True}, **fields)
