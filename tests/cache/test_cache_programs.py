"""The compiled decoding step: it copies no cache, has no branch on GPUs and sends one sum."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import CacheConfig, DecoderBlock, MultiHeadAttention, sharding
from flax_mha.kernels.xla import decode, reference
from flax_mha.masks import Window
from flax_mha.models import Decoder
from tests.cache.test_cache import KEY, RNG, close
from tests.support.meshes import on
from tests.support.oracle import random_like
from tests.support.platforms import pretend

pytestmark = pytest.mark.usefixtures("small_blocks")


SMALL: dict[str, nn.Module] = {
    "float32": MultiHeadAttention(2, decode=True),
    "int8": MultiHeadAttention(2, decode=True, cache=CacheConfig("int8")),
    "layers that share a cache": Decoder(
        3, DecoderBlock(MultiHeadAttention(2, decode=True), 8), kv_from=(None, 0, 0)
    ),
}


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("optimized")
def test_step_does_not_copy_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_BLOCK", {"cpu": 32})
    monkeypatch.setattr(reference, "_ROWS", {})
    shapes = (jax.ShapeDtypeStruct((2, T, 32), jnp.float32) for T in (1024, 1))
    compiled, variables = compiled_step(SMALL[name], *shapes)
    moved = re.findall(
        r"\[2,2,1024,16\]\S* (?:copy|transpose)\(.*|\[2,1024,2,16\].*", compiled.as_text()
    )
    assert not moved
    size = max(x.size for x in jax.tree.leaves(variables["cache"]))
    assert compiled.memory_analysis().temp_size_in_bytes < size


def compiled_step(model: nn.Module, full: Any, token: Any, place: Any = None) -> tuple[Any, Any]:
    """Return the program of a step that may write in place, and the model's variables."""
    variables = jax.eval_shape(model.init, KEY, full)

    def step(params: Any, cache: Any, x: jax.Array) -> Any:
        return model.apply({"params": params, "cache": cache}, x, mutable=["cache"])

    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (variables["params"], variables["cache"], token),
    )
    return jax.jit(step, donate_argnums=1).lower(*arguments).compile(), variables


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_step_on_a_gpu_has_no_branch(dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch or loop takes longer there than to read a cache that is not huge."""
    pretend(monkeypatch, "gpu")
    module = MultiHeadAttention(
        16, dtype=jnp.bfloat16, decode=True, mask=Window(900, 0), cache=CacheConfig(dtype)
    )
    variables = jax.eval_shape(module.init, KEY, jnp.ones((2, 2048, 32)))

    def step(x: jax.Array) -> Any:
        return module.apply(zeros, x, mutable=["cache"])

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables)
    text = jax.jit(step).lower(jnp.ones((2, 1, 32))).as_text()
    assert not re.findall("stablehlo.(?:while|case|if)", text)
    huge = {"gpu": 2**10}
    monkeypatch.setattr(decode, "_LEAST_BYTES", huge)
    text = jax.jit(lambda x: step(x)).lower(jnp.ones((2, 1, 32))).as_text()
    assert re.findall("stablehlo.(?:while|case|if)", text)


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_few_rows_of_a_scanned_stack_agree_with_matmuls(
    dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs a layer's part of a cache is read by sums of products."""
    attention = MultiHeadAttention(4, num_kv_heads=2, decode=True, cache=CacheConfig(dtype))
    model = Decoder(2, DecoderBlock(attention, 16), scan=True)
    x = RNG.normal(size=(2, 9, 8)).astype(np.float32)
    shapes = jax.eval_shape(model.init, KEY, x)
    params, empty = random_like(shapes["params"]), jax.tree.map(jnp.zeros_like, shapes["cache"])

    def outputs() -> Any:
        step = jax.jit(
            lambda held, x: model.apply({"params": params, "cache": held}, x, mutable="cache")
        )
        _, prompt = step(empty, x[:, :2])
        return step(prompt["cache"], x[:, 2:4])

    expected = outputs()
    called = []
    monkeypatch.setattr(decode, "_FEW_ROWS", {"cpu": 4})
    real = decode._sum_by_row
    monkeypatch.setattr(decode, "_sum_by_row", lambda *a, **k: called.append(1) or real(*a, **k))
    jax.tree.map(close, outputs(), expected)
    assert called


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_sharded_step_sends_only_sum_over_heads() -> None:
    layer = MultiHeadAttention(4, decode=True)
    x = jnp.ones((2, 128, 16))
    with on("Explicit") as mesh:
        variables = sharding.init(layer, KEY, x)
        assert tuple(variables["cache"]["kv"].key.sharding.spec)[:2] == ("data", "model")
        token = jax.device_put(x[:, :1], NamedSharding(mesh, P("data")))
        step = jax.jit(lambda v, x: layer.apply(v, x, mutable=["cache"]))
        text = step.lower(variables, token).compile().as_text()
    sent = re.findall(r"= (\S+?)\{\S* (?:all-|reduce-scatter|collective-)", text)
    assert sent == ["f32[1,1,16]"]
