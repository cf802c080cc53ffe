"""`jax.vmap` over a sharded axis: Explicit axes, and Auto axes with `spmd_axis_name`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import (
    DecoderBlock,
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
    dot_product_attention,
    explain,
    masks,
    nnx,
    sharding,
    variants,
)
from flax_mha.kernels.cudnn import primitives
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding
from flax_mha.positions import Rotary, rotary
from tests.support.decoding import cache_of
from tests.support.meshes import BACKWARD, KEY, KINDS, RNG, changed, collectives, compare, on
from tests.support.oracle import error, random_like
from tests.support.platforms import pretend

SHAPE = (4, 2)
X = RNG.normal(size=(4, 2, 8, 16)).astype(np.float32)
IDS = RNG.integers(0, 10, (4, 2, 8))
LAYER = MultiHeadAttention(4, num_kv_heads=2, use_bias=False, rotary=Rotary(interleaved=True))
# One for each feature of a head: the gradient of a single one is a sum that cancels.
SCALES = np.ones((1, 1, 4, 4), np.float32)
BLOCKS = changed(heads=None, kv_heads=None, mlp=None, vocab=None, length="model")
SLOTS = changed(heads=None, kv_heads=None, mlp=None, vocab=None, cache_length="model")


def mapped(kind: str, fn: Any, axes: Any = (None, 0), over: Any = "data") -> Any:
    """Return `jax.vmap` of fn over a mesh axis."""
    more = {"spmd_axis_name": over} if kind == "Auto" else {}
    return jax.vmap(fn, in_axes=axes, **more)


def drawn(module: Any, x: Any = X) -> Any:
    return random_like(jax.eval_shape(module.init, KEY, x[0]))


def applied(module: Any) -> Any:
    """Return a module's function, variables and inputs."""
    return module.apply, drawn(module), X


def attend(v: Any, x: jax.Array, **call: Any) -> Any:
    x = rotary(x.reshape(*x.shape[:-1], 4, 4), jnp.arange(8))
    x = sharding.constrain(x, sharding.HEADS)
    return dot_product_attention(x * v, x, x, mask=masks.Causal(), **call)


def attending(**call: Any) -> Any:
    return functools.partial(attend, **call), SCALES, X


def model() -> Any:
    lm = LanguageModel(TokenEmbedding(10, 16), Decoder(2, DecoderBlock(LAYER, 32), scan=True))
    return lm.apply, drawn(lm, IDS), IDS


def in_nnx() -> Any:
    from flax import nnx as flax_nnx

    graph, state = flax_nnx.split(
        nnx.MultiHeadAttention(4, 16, use_bias=False, rngs=flax_nnx.Rngs(0))
    )
    return (lambda state, x: flax_nnx.merge(graph, state)(x)), state, X


def decode() -> Any:
    layer = MultiHeadAttention(4, decode=True, use_bias=False)
    params = random_like(jax.eval_shape(layer.init, KEY, X[0])["params"])
    empty = cache_of(layer, X[0])

    def run(v: Any, x: jax.Array) -> Any:
        prompt, cache = layer.apply({**v, "cache": empty}, x[:, :6], mutable="cache")
        return prompt, layer.apply({**v, **cache}, x[:, 6:7], mutable="cache")[0]

    return run, {"params": params}, X


CASES: dict[str, tuple[Any, Any]] = {
    "layer": (lambda: applied(LAYER), sharding.RULES),
    "layer without rules": (lambda: applied(LAYER), ()),
    "remat": (lambda: (jax.checkpoint(LAYER.apply), drawn(LAYER), X), sharding.RULES),
    "heads on the mapped axis": (
        lambda: applied(LAYER.clone(num_kv_heads=4)),
        changed(batch=None, heads="data", kv_heads="data"),
    ),
    "reference": (lambda: attending(kernel="reference"), sharding.RULES),
    "blockwise": (lambda: attending(kernel="blockwise"), sharding.RULES),
    "captured": (lambda: attending(return_weights=True), sharding.RULES),
    "ring": (lambda: attending(kernel="ring"), BLOCKS),
    "nnx": (in_nnx, sharding.RULES),
    "decoding": (decode, sharding.RULES),
    "slots": (decode, SLOTS),
    **{
        type(layer).__name__: (functools.partial(applied, layer), sharding.RULES)
        for layer in (
            variants.ForgettingAttention(4, use_bias=False),
            variants.DifferentialAttention(4, use_bias=False),
            variants.TalkingHeadsAttention(4, use_bias=False),
            variants.ChosenBlocksAttention(4, use_bias=False, block=4, count=1),
        )
    },
    "encoder": (
        lambda: applied(Encoder(1, EncoderBlock(LAYER, 32))), changed(norm_length="model"),
    ),
    "model": (model, sharding.RULES),
}  # fmt: skip


@pytest.mark.sampled(0.018)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_mapped_functions_match_a_loop_without_a_mesh(name: str, kind: str) -> None:
    """Outputs and gradients."""
    make, rules = CASES[name]
    fn, v, x = make()

    def loop(v: Any, x: Any) -> Any:
        return jax.tree.map(lambda *y: jnp.stack(y), *[fn(v, one) for one in x])

    compare(mapped(kind, fn), (v, x), kind, rules, [P(), P("data")], SHAPE, alone=loop)


@pytest.mark.sampled(0.09)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_example(kind: str) -> None:
    """The gradients of unmapped parameters that are not on the mesh."""
    v = drawn(LAYER)
    pull = jax.grad(lambda v, x: jnp.sum(jnp.sin(3 * LAYER.apply(v, x))))
    wanted = jax.jit(jax.vmap(pull, in_axes=(None, 0)))(v, X)
    with on(kind, shape=SHAPE) as mesh:
        placed = jax.device_put(X, NamedSharding(mesh, P("data")))
        got = jax.device_get(jax.jit(mapped(kind, pull))(v, placed))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) < BACKWARD


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", [("data", "model"), ("data", None), (None, "data")])
def test_nested_maps(axes: Any, kind: str) -> None:
    fn, v, _ = applied(LAYER)
    x = RNG.normal(size=(4, 4, 8, 16)).astype(np.float32)
    rules = changed(heads=None, kv_heads=None) if "model" in axes else sharding.RULES
    twice = mapped(kind, mapped(kind, fn, over=axes[1]), over=axes[0])
    alone = jax.vmap(jax.vmap(fn, in_axes=(None, 0)), in_axes=(None, 0))
    compare(twice, (v, x), kind, rules, [P(), P(*axes)], SHAPE, alone=alone)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_sent_along_the_mapped_axis(optimized: None, kind: str) -> None:
    """The heads need one all-reduce, and the gradients of parameters another."""
    v = drawn(LAYER)
    with on(kind, shape=SHAPE) as mesh:
        x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data")))
        fn = jax.jit(mapped(kind, LAYER.apply))
        found = collectives(fn.lower(v, x).compile().as_text())
    assert [one for one, _ in found] == ["all-reduce"]


@pytest.mark.parametrize("kind", KINDS)
def test_fused_kernels_run_or_say_why_not(monkeypatch: Any, kind: str) -> None:
    pretend(monkeypatch, "gpu")
    monkeypatch.setattr(primitives, "gpu", lambda platform: ((9, 0), (9, 20, 0)))
    x, found = jnp.ones((4, 2, 1024, 4, 64), jnp.bfloat16), []
    with on(kind, shape=SHAPE) as mesh:
        placed = jax.device_put(x, NamedSharding(mesh, P("data")))
        jax.eval_shape(
            mapped(kind, lambda x: (found.append(explain(x, x, x)), x)[1], axes=0), placed
        )
    if kind == "Auto":
        assert found[0].chosen == "cudnn"
    else:
        assert "mesh axes ['data'], or jax.vmap maps over them" in found[0].refused["cudnn"]
