"""The context `use`: the kernel and the blocks of all calls in it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, Platform, dot_product_attention, explain, kernels
from flax_mha.kernels.flex.hopper import LACKING
from flax_mha.kernels.using import resolve
from flax_mha.masks import BlockSparse, Causal, Segments
from flax_mha.scores import Alibi
from tests.kernels.test_flex_hopper import H200
from tests.support.oracle import error

RNG = np.random.default_rng(0)
Q, K, V, C = (jnp.asarray(RNG.normal(size=(2, n, 2, 8)), "float32") for n in (70, 90, 90, 70))
IDS = np.arange(90) // 20
CALL = {"mask": Causal() & Segments(IDS[:70], IDS), "scores": (Alibi(),)}
SIZES = [(16, 32), (None, 40), (70, None), (500, 7)]


def pulled(kernel: str = "auto") -> list[jax.Array]:
    def attend(*qkv):
        return dot_product_attention(*qkv, kernel=kernel, **CALL)

    @jax.jit
    def run(*qkv):
        out, pull = jax.vjp(attend, *qkv)
        return [out, *pull(C)]

    return run(Q, K, V)


@pytest.mark.sampled(0.042)
@pytest.mark.parametrize("kernel", ["blockwise", "checkpointed"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_blocks_change_no_number(kernel: str, sizes: tuple) -> None:
    with kernels.use(kernel, block_q=sizes[0], block_k=sizes[1]):
        found = pulled()
    for ours, expected in zip(found, pulled("reference"), strict=True):
        assert error(ours, expected) < 1e-5


@pytest.mark.slow
def test_blocks_of_flex_change_no_number(tpu) -> None:
    expected = pulled("reference")
    with kernels.use("flex", block_q=128, block_k=256):
        assert explain(Q, K, V, **CALL).tile == (128, 256)
        for ours, other in zip(pulled(), expected, strict=True):
            assert error(ours, other) < 1e-5


@pytest.mark.sampled(0.08)
def test_context_holds_for_a_jitted_model_and_is_traced_anew() -> None:
    x = jnp.asarray(RNG.normal(size=(1, 300, 16)), "float32")
    by_default, named = (
        nn.remat(MultiHeadAttention)(2, mask=Causal(), kernel=kernel)
        for kernel in ("auto", "reference")
    )
    variables = by_default.init(jax.random.key(0), x)
    calls = [jax.jit(functools.partial(layer.apply, variables)) for layer in (by_default, named)]

    def programs() -> list[str]:
        return [call.lower(x).as_text() for call in calls]

    before, reference = programs()
    assert before != reference
    outside = calls[0](x)
    with kernels.use("reference"):
        found = programs()
        assert found[0] == found[1]
        np.testing.assert_array_equal(calls[0](x), calls[1](x))
        with kernels.use(block_q=64):
            assert resolve("auto") == ("auto", (64, None))
            assert calls[0].lower(x).as_text() != found[0]
    assert programs() == [before, reference]
    np.testing.assert_array_equal(calls[0](x), outside)


def test_named_kernels_keep_their_name_and_refuse_blocks() -> None:
    with kernels.use("blockwise", block_q=16):
        assert resolve("checkpointed")[0] == "checkpointed"
        with pytest.raises(ValueError, match=r"has no blocks to set, got TileSize\(q=16, k=None\)"):
            dot_product_attention(Q, K, V, kernel="reference")
    on = Platform("tpu", "TPU v5 lite")
    x = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)
    with kernels.use(block_k=100):
        told = explain(x, x, x, platform=on)
        rule = "takes blocks of multiples of 128, got TileSize(q=None, k=100)"
        assert told.refused["flex"] == rule
        assert told.chosen == "blockwise"
    with kernels.use("flex", block_q=256):
        told = explain(x, x, x, platform=on)
        assert explain(x, x, x, platform=on, kernel="reference").chosen is None
    assert "flex          chosen, in tiles of 256 queries × 512 keys, as set" in str(told)
    told = explain(x, x, x, platform=on, kernel="flex")
    assert "in tiles of 512 queries × 512 keys, the default" in str(told)
    blocks = np.arange(8)[:, None]
    told = explain(x, x, x, platform=on, kernel="flex", mask=BlockSparse(blocks, 128, 128))
    assert told[3:5] == ((128, 128), "for the mask's blocks")
    if LACKING is None:
        with kernels.use("flex", block_q=256):
            assert "tiles of one size" in explain(x, x, x, platform=H200).refused["flex"]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"kernel": "flux"}, "kernel must be 'auto' or one of .* got 'flux'"),
        ({"block_q": 0}, "block_q must be positive, got 0|block_q .* got 0"),
        ({"block_k": 1.5}, "block_k .* got .*1.5"),
    ],
)
def test_wrong_arguments_are_refused(given: dict, rule: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rule), kernels.use(**given):
        pass
    assert resolve("auto") == ("auto", (None, None))
