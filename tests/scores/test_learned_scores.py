"""Learned scores: the owners of their parameters, their values and their gradients."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha
from flax_mha import Decoder, DecoderBlock, Encoder, EncoderBlock, MultiHeadAttention, sharding
from flax_mha.scores import Alibi, Relative, RelativeBias, SoftCap, TransformerXL, relative_bucket
from tests.support.arrays import random_variables
from tests.support.decoding import decoded
from tests.support.oracle import error

N, D, T = 4, 16, 40
KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)


def block(**fields: Any) -> EncoderBlock:
    return EncoderBlock(MultiHeadAttention(N, **fields), mlp_dim=8)


def bucket_of(d: int, buckets: int, bidirectional: bool, most: int) -> int:
    """Return T5's bucket of a distance in integers, without rounded logarithms."""
    first = 0
    if bidirectional:
        buckets //= 2
        first, d = buckets * (d > 0), abs(d)
    d = max(-d, 0) if not bidirectional else d
    exact = buckets // 2
    count, bucket = buckets - exact, min(d, exact)
    # d ≥ exact·(most/exact)^(m/count), both sides to the power of count.
    while d >= exact and bucket < buckets - 1:
        if d**count < most ** (bucket + 1 - exact) * exact ** (buckets - 1 - bucket):
            break
        bucket += 1
    return first + bucket


@pytest.mark.sampled(0.08)
def test_buckets_match_integer_formula() -> None:
    """At all distances, in 138 settings that include the published models'."""
    distances = np.array([*range(-70, 71), *np.arange(71, 1100, 19), *(-np.arange(80, 1100, 20))])
    settings = [
        (buckets, bidirectional, most)
        for buckets in (4, 6, 8, 16, 20, 32, 64, 128, 320)
        for bidirectional in (False, True)
        for most in (50, 64, 100, 128, 256, 512, 800, 1000)
        if most > buckets // (4 if bidirectional else 2)
    ]
    assert len(settings) >= 135
    for setting in settings:
        expected = [bucket_of(int(d), *setting) for d in distances]
        np.testing.assert_array_equal(relative_bucket(distances, *setting), expected, str(setting))


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_layers_of_stack_share_one_bias_table(kind: Any, scan: bool) -> None:
    one = DecoderBlock if kind is Decoder else EncoderBlock
    made = one(MultiHeadAttention(N), mlp_dim=8)
    stack = kind(2, made, scan=scan, scores=(RelativeBias(bidirectional=False, buckets=16),))
    plain = kind(2, made, scan=scan)

    drawn = random_variables(stack, X)

    @jax.jit  # One program: compiling each would cost more than running it.
    def compute(variables: Any) -> Any:
        params = dict(variables["params"])
        table = params.pop("relative_bias")
        assert table.shape == (N, 16)
        assert "relative_bias" not in str(jax.tree.structure(params))
        scores = (RelativeBias(table, bidirectional=False),)
        pairs = [
            (
                stack.apply(variables, X, scores=more),
                plain.apply({"params": params}, X, scores=all_),
            )
            for more, all_ in (((), scores), ((Alibi(),), (*scores, Alibi())))
        ]
        gradient = jax.grad(lambda p: jnp.sum(stack.apply(p, X) ** 3))(variables)
        return pairs, gradient["params"]["relative_bias"]

    pairs, gradient = compute(drawn)
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.sampled(0.08)
def test_two_bias_tables_get_names_and_axes() -> None:
    layer = MultiHeadAttention(
        N, scores=(RelativeBias(), RelativeBias(buckets=8)), partitioned=True
    )
    boxed = jax.eval_shape(layer.init, KEY, X)["params"]
    assert boxed["relative_bias"].names == ("heads", None)
    assert boxed["relative_bias_1"].value.shape == (N, 8)
    stack = Encoder(1, block(partitioned=True), scores=(RelativeBias(),))
    assert jax.eval_shape(stack.init, KEY, X)["params"]["relative_bias"].names == ("heads", None)


@pytest.mark.sampled(0.08)
def test_learned_scores_on_mesh_match_one_device() -> None:
    stack = Encoder(2, block(), scores=(RelativeBias(),))
    variables = random_variables(stack, X)
    expected = jax.jit(stack.apply)(variables, X)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        np.testing.assert_allclose(jax.jit(stack.apply)(variables, X), expected, atol=1e-5)


SCORES = {
    "bias": (RelativeBias(), {"relative_bias": (N, 32)}),
    "relative": (Relative(max_distance=3), {"relative_keys": (7, 4)}),
    "xl": (
        TransformerXL(features=6),
        {"relative_content_bias": (N, 4), "relative_position_bias": (N, 4),
         "relative_kernel": (6, N, 4)},
    ),
}  # fmt: skip


@pytest.mark.sampled(0.099)
@pytest.mark.parametrize("kind", SCORES)
def test_scores_learn(kind: str) -> None:
    """In a linen layer, in nnx and in a stack. Decoding equals the full forward."""
    score, shapes = SCORES[kind]
    layer = MultiHeadAttention(N, scores=(score,), num_kv_heads=2, mask=flax_mha.masks.Causal())
    variables = random_variables(layer, X)
    assert {name: variables["params"][name].shape for name in shapes} == shapes
    whole, gradient = jax.jit(
        jax.value_and_grad(lambda p: jnp.sum(layer.apply(p, X[:, :8]) ** 2), has_aux=False)
    )(variables)
    assert all(np.abs(gradient["params"][name]).max() > 1e-4 for name in shapes)
    steps = decoded(layer.clone(decode=True), variables, X[:, :8], (3, 5))
    np.testing.assert_allclose(jnp.sum(steps**2), whole, rtol=1e-5)
    stack = Encoder(2, block(), scores=(score,))
    params = jax.eval_shape(stack.init, KEY, X)["params"]
    assert {name: params[name].shape for name in shapes} == shapes
    other = flax_mha.nnx.MultiHeadAttention(N, D, scores=(score,), rngs=nnx.Rngs(0))
    assert {name: getattr(other, name).get_value().shape for name in shapes} == shapes
    given = {name.removeprefix("relative_"): getattr(other, name).get_value() for name in shapes}
    given = {"table" if name in ("keys", "bias") else name: x for name, x in given.items()}
    told = flax_mha.nnx.MultiHeadAttention(N, D, scores=(score.replace(**given),), rngs=nnx.Rngs(0))
    run = nnx.jit(lambda layer: layer(X))
    assert error(run(other), run(told)) < 1e-6


def test_soft_cap_may_exceed_int32() -> None:
    attend = jax.jit(flax_mha.dot_product_attention, static_argnames="scores")
    capped, plain = (attend(*[X[..., None]] * 3, scores=some) for some in ((SoftCap(2**31),), ()))
    np.testing.assert_allclose(capped, plain, atol=1e-6)
