"""Models without some heads have the outputs and gradients of models that mask them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import MultiHeadAttention, QKNorm, masks, scores, variants
from flax_mha.analysis import prune
from flax_mha.positions import Rotary
from tests.analysis.pruning_cases import KEY, RNG, D, N, T, X, drawn
from tests.support.oracle import error, random_like

TABLE = RNG.random((1, N, T, T)) < 0.7


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "qkv_features": (MultiHeadAttention(N, qkv_features=12, v_head_dim=5), (0, 1, 3)),
    "no biases": (MultiHeadAttention(N, use_bias=False, rotary=Rotary()), (2,)),
    "one of each group": (MultiHeadAttention(N, num_kv_heads=2, rotary=Rotary()), (1, 2)),
    "a whole group": (MultiHeadAttention(N, num_kv_heads=2, gate="head"), (0, 1)),
    "everything": (
        MultiHeadAttention(
            N, num_kv_heads=2, head_dim=6, sinks=True, scale="learned", gate="feature",
            qk_norm=QKNorm(), rotary=Rotary(), mask=masks.Causal(),
        ), (0, 3),
    ),
    "masks": (
        MultiHeadAttention(
            N, mask=(masks.Causal() & ~masks.Dense(TABLE)) | masks.Dense(TABLE[:, :1, :, ::-1])
        ), (0, 2),
    ),
    "learned scores": (
        MultiHeadAttention(
            N, scores=(scores.RelativeBias(), scores.SoftCap(5.0), scores.RelativeBias(),
             scores.Relative(max_distance=3), scores.TransformerXL(features=D)),
        ), (0, 2),
    ),
    "given scores": (
        MultiHeadAttention(
            N, scores=(scores.Alibi(), scores.Bias(RNG.normal(size=(N, 1, T))),
            scores.Relative(RNG.normal(size=(5, 4)))),
        ), (0, 2),
    ),
    "latent": (
        variants.MultiHeadLatentAttention(
            N, head_dim=4, kv_rank=7, rope_dim=4, q_rank=9, rotary=Rotary(), mask=masks.Causal()
        ), (0, 2),
    ),
    "latent without q_rank": (
        variants.MultiHeadLatentAttention(N, kv_rank=7, rope_dim=4, rotary=Rotary()), (3,)
    ),
    "differential": (
        variants.DifferentialAttention(N, mask=masks.Causal(), scores=(scores.RelativeBias(),)),
        (0, 2),
    ),
    "differential groups": (variants.DifferentialAttention(N, num_kv_heads=2), (0, 2)),
    "forgetting": (variants.ForgettingAttention(N, num_kv_heads=2, sinks=True), (1, 2)),
    "chosen blocks": (variants.ChosenBlocksAttention(N, block=2, count=2), (0, 2)),
}  # fmt: skip
REPEATED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "repeated": (MultiHeadAttention(N, num_kv_heads=2, sinks=True, qk_norm=QKNorm()), (1,)),
    "repeated in pairs": (MultiHeadAttention(8, num_kv_heads=2, head_dim=3), (1, 3)),
    "differential repeated": (variants.DifferentialAttention(N, num_kv_heads=2), (0,)),
}


def size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def check_layer(layer: Any, removed: tuple[int, ...], repeat_kv: bool = False) -> Any:
    """Check output and gradients, those of all parameters of the larger layer, and return the
    smaller layer.
    """
    variables = drawn(layer, X)
    keep = np.ones(layer.num_heads, np.float32)
    keep[list(removed)] = 0

    def masked(variables: Any, x: Any, keep: Any) -> jax.Array:
        return layer.apply(variables, x, head_mask=keep)

    def pruned(variables: Any, x: Any, keep: Any) -> jax.Array:
        small, fewer = prune(layer, variables, {"": removed}, repeat_kv=repeat_kv)
        return small.apply(fewer, x)

    def with_gradients(apply: Any) -> Any:
        def loss(*args: Any) -> Any:
            out = apply(*args)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))

    small, fewer = prune(layer, variables, {"": removed}, repeat_kv=repeat_kv)
    shapes = jax.eval_shape(small.init, KEY, X)
    assert jax.tree.map(jnp.shape, fewer) == jax.tree.map(jnp.shape, shapes)
    assert small.num_heads == layer.num_heads - len(removed)
    assert repeat_kv or size(fewer) < size(variables)
    actual, expected = with_gradients(pruned)(variables, X, keep), with_gradients(masked)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        actual, expected(variables, X, keep),
    )  # fmt: skip
    assert error(actual[1], expected(variables, X, np.ones_like(keep))[1]) > 1e-2
    return small


@pytest.mark.sampled(0.048)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_without_heads_equals_one_that_masks_them(name: str) -> None:
    check_layer(*LAYERS[name])


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("name", REPEATED)
def test_keys_and_values_are_repeated_for_uneven_groups(name: str) -> None:
    """Only as many as needed."""
    small = check_layer(*REPEATED[name], repeat_kv=True)
    if name == "repeated in pairs":
        assert (small.num_heads, small.num_kv_heads) == (6, 3)


class TwoLayers(nnx.Module):
    """A user's module of nnx."""

    def __init__(self, **fields: Any) -> None:
        self.layers = nnx.List(
            flax_mha.nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(i), **fields) for i in range(2)
        )

    def __call__(self, x: jax.Array, head_mask: Any = (None, None)) -> jax.Array:
        for layer, mask in zip(self.layers, head_mask, strict=True):
            x = layer(x, head_mask=mask)
        return x


def randomize(module: nnx.Module) -> None:
    nnx.update(module, nnx.State(random_like(nnx.to_pure_dict(nnx.state(module, nnx.Param)))))


@pytest.mark.sampled(0.08)
def test_nnx_layers_lose_heads() -> None:
    model = TwoLayers(
        num_kv_heads=2, sinks=True, scale="learned", gate="feature", qk_norm=QKNorm(),
        scores=(scores.RelativeBias(), scores.Alibi()), mask=masks.Causal() & masks.Dense(TABLE),
    )  # fmt: skip
    randomize(model)
    small = prune(model, {"layers/0": (1, 3), "layers/1": (0,)}, repeat_kv=True)
    keep = (np.array([1.0, 0, 1, 0], np.float32), np.array([0.0, 1, 1, 1], np.float32))
    call = nnx.jit(lambda model, *args: model(*args))
    out = call(small, X)
    assert error(out, call(model, X, keep)) < 1e-5
    assert error(out, call(model, X, (np.ones(N, np.float32),) * 2)) > 1e-2
    assert size(nnx.state(small, nnx.Param)) < size(nnx.state(model, nnx.Param))
    assert small.layers[0].query.out_features == (2, D // N)


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("kind", ["MultiHeadAttention", "ForgettingAttention"])
def test_a_pruned_nnx_layer_decodes(kind: str) -> None:
    layer = getattr(flax_mha.nnx, kind)(N, D, num_kv_heads=2, gate="head", rngs=nnx.Rngs(0))
    randomize(layer)
    keep = np.array([0.0, 1, 1, 0], np.float32)
    small = prune(layer, {"": (0, 3)})
    call = nnx.jit(lambda layer, x, **call: layer(x, **call))
    whole = call(layer, X, mask=masks.Causal(), head_mask=keep)
    assert error(call(small, X, mask=masks.Causal()), whole) < 1e-5
    small.init_cache(X.shape)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    steps = [step(small, x) for x in np.split(X, [3, 4], 1)]
    assert error(np.concatenate(steps, 1), whole) < 1e-5
    assert prune(small, {"": (0,)}, repeat_kv=True).kv is None
