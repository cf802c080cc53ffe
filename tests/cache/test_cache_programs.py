"""The compiled decoding step: it copies no cache and gives the same numbers on a mesh."""

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.plan import gpus
from flax_mha import CacheConfig, DecoderBlock, MultiHeadAttention, cache, sharding
from flax_mha.kernels.xla import decode
from flax_mha.masks import Window
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding
from flax_mha.positions import Rotary
from tests.cache.test_cache import KEY, RNG, X, close
from tests.support.platforms import pretend

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.usefixtures("optimized")
def test_step_does_not_copy_cache(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_BLOCK", {"cpu": 32})
    monkeypatch.setattr(decode, "_ROWS", {})
    layer = MultiHeadAttention(2, decode=True, cache=CacheConfig(dtype))
    x = jnp.ones((2, 1024, 32))
    variables = jax.eval_shape(layer.init, KEY, x)

    def step(params: Any, cache: Any, x: jax.Array) -> Any:
        return layer.apply({"params": params, "cache": cache}, x, mutable=["cache"])

    compiled = (
        jax.jit(step, donate_argnums=1)
        .lower(variables["params"], variables["cache"], jax.eval_shape(lambda: x[:, :1]))
        .compile()
    )
    moved = re.findall(
        r"\[2,2,1024,16\]\S* (?:copy|transpose)\(.*|\[2,1024,2,16\].*", compiled.as_text()
    )
    assert not moved
    size = variables["cache"]["kv"].key.size
    assert compiled.memory_analysis().temp_size_in_bytes < size


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_step_on_a_gpu_has_no_branch(dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch or loop takes longer there than to read a cache that is not huge."""
    pretend(monkeypatch, "gpu")
    module = layer(mask=Window(900, 0), cache=CacheConfig(dtype))
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


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_few_rows_of_a_scanned_stack_agree_with_matmuls(
    dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs a layer's part of a cache is read by sums of products."""
    attention = MultiHeadAttention(4, num_kv_heads=2, decode=True, cache=CacheConfig(dtype))
    model = Decoder(2, DecoderBlock(attention, 16), scan=True)
    x = jnp.asarray(RNG.normal(size=(2, 9, 8)), jnp.float32)
    variables = model.init(KEY, x)
    _, prompt = model.apply(variables, x[:, :7], mutable=["cache"])

    def outputs() -> Any:
        step = jax.jit(lambda v, x: model.apply(v, x, mutable=["cache"]))
        return step({**variables, **prompt}, x[:, 7:])

    expected = outputs()
    called = []
    monkeypatch.setattr(decode, "_FEW_ROWS", {"cpu": 4})
    real = decode._sum_by_row
    monkeypatch.setattr(decode, "_sum_by_row", lambda *a, **k: called.append(1) or real(*a, **k))
    jax.tree.map(close, outputs(), expected)
    assert called


def layer(**fields: Any) -> MultiHeadAttention:
    return MultiHeadAttention(16, dtype=jnp.bfloat16, decode=True, **fields)


SCANNED = layer(param_dtype=jnp.bfloat16)
STEPS: dict[str, nn.Module] = {
    "one head of queries each": layer(),
    "grouped": layer(num_kv_heads=4, rotary=Rotary()),
    "int8": layer(cache=CacheConfig("int8")),
    "ring": layer(mask=Window(1024, 0), cache=CacheConfig(slots=1152)),
    "scanned stack": Decoder(4, DecoderBlock(SCANNED, 64), scan=True),
    "scanned grouped": Decoder(4, DecoderBlock(SCANNED.copy(num_kv_heads=4), 64), scan=True),
    "scanned alternating blocks": Decoder(
        4,
        [DecoderBlock(SCANNED, 64), DecoderBlock(SCANNED.copy(rotary=Rotary()), 64)],
        scan=True,
    ),
}
# cuBLAS's own space is as large as a ring.
ON_GPUS = [name for name in STEPS if name != "ring"]


def step_temporaries(device: Any, model: nn.Module) -> tuple[int, int]:
    """Compile a step for a device that may be absent; return bytes of temporaries and cache."""
    mesh = Mesh(np.array([device]), ("data",))
    full, one = (jax.ShapeDtypeStruct((8, T, 2048), jnp.bfloat16) for T in (8192, 1))
    variables = jax.eval_shape(model.init, KEY, full)

    def step(params: Any, cache: Any, x: jax.Array) -> Any:
        return model.apply({"params": params, "cache": cache}, x, mutable=["cache"])

    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())),
        (variables["params"], variables["cache"], one),
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=1).lower(*arguments).compile()
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(variables["cache"]))
    return compiled.memory_analysis().temp_size_in_bytes, cache


def check_copies_no_cache(device: Any, name: str) -> None:
    temporaries, cache = step_temporaries(device, STEPS[name])
    # Less than keys or values alone: a GPU's program keeps partial sums.
    assert temporaries < cache / 3


@pytest.mark.sampled(0, slow=0.3)
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu")
@pytest.mark.parametrize("name", STEPS)
@jax.numpy_dtype_promotion("standard")  # Flax's norms mix dtypes.
def test_step_copies_no_cache_on_tpus(optimized: None, name: str) -> None:
    check_copies_no_cache(topologies.get_topology_desc("v5e:2x2", "tpu").devices[0], name)


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.skipif(gpus.lacking() is not None, reason=str(gpus.lacking()))
@pytest.mark.parametrize("name", ON_GPUS)
@jax.numpy_dtype_promotion("standard")
def test_step_copies_no_cache_on_gpus(optimized: None, name: str) -> None:
    check_copies_no_cache(gpus.of("h200", 1)[0], name)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_sharded_step_sends_only_sum_over_heads() -> None:
    layer = MultiHeadAttention(4, decode=True)
    x = jnp.ones((2, 128, 16))
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        variables = sharding.init(layer, KEY, x)
        token = jax.device_put(x[:, :1], NamedSharding(mesh, P("data")))
        step = jax.jit(lambda v, x: layer.apply(v, x, mutable=["cache"]))
        text = step.lower(variables, token).compile().as_text()
    sent = re.findall(r"= (\S+?)\{\S* (?:all-|reduce-scatter|collective-)", text)
    assert sent == ["f32[1,1,16]"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_decoding_matches_one_device(kind: str) -> None:
    """Ragged rows, a ring and int8, sharded over rows and heads and forked. Caches are created
    sharded.
    """
    layer = MultiHeadAttention(
        4, decode=True, mask=Window(3, 0), cache=CacheConfig("int8", slots=6), rotary=Rotary()
    )
    lengths = jnp.array([8, 3])

    def run(variables: Any, x: jax.Array, put: Callable[[jax.Array], jax.Array]) -> Any:
        step = jax.jit(lambda v, x, n: layer.apply(v, x, lengths=n, mutable=["cache"]))
        outs = []
        for piece in (x[:, :8], x[:, 8:9]):
            out, new = step(variables, put(piece), put(jnp.minimum(lengths, piece.shape[1])))
            variables = {**variables, **new}
            outs.append(jax.device_get(out))
        forked = jax.jit(cache.fork)(variables["cache"], jnp.array([1, 0]))
        out, new = step({**variables, "cache": forked}, put(x[:, 9:10]), put(jnp.ones(2, int)))
        return [*outs, jax.device_get(out)], new["cache"]

    expected, _ = run(layer.init(KEY, X), X, lambda x: x)
    types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        variables = sharding.init(layer, KEY, X)
        assert tuple(variables["cache"]["kv"].key.sharding.spec)[:2] == ("data", "model")
        got, held = run(variables, X, lambda x: jax.device_put(x, NamedSharding(mesh, P("data"))))
    assert tuple(held["kv"].key_scale.sharding.spec)[:2] == ("data", "model")
    jax.tree.map(lambda a, b: close(a, b, 2e-5), got, expected)


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize(
    ("kind", "scan"),
    [pytest.param("Auto", False, marks=pytest.mark.slow), ("Explicit", True)],
)
def test_step_tokens_are_not_sharded(kind: str, scan: bool) -> None:
    """Five tokens, then one and one, under rules that shard sequences over two devices."""
    layer = MultiHeadAttention(4, num_kv_heads=2, decode=True, rotary=Rotary())
    decoder = Decoder(1, DecoderBlock(layer, 16), scan=scan)
    model = LanguageModel(TokenEmbedding(6, 8), decoder)
    tokens = jnp.asarray(RNG.integers(0, 6, (2, 8)))

    def run(variables: Any) -> jax.Array:
        step = jax.jit(lambda v, x: model.apply(v, x, mutable=["cache"]))
        outs = []
        for first, end in ((0, 5), (5, 6), (6, 7)):
            out, new = step(variables, tokens[:, first:end])
            variables = {**variables, **new}
            outs.append(jax.device_get(out))
        return jnp.concatenate(outs, 1)

    expected = run(model.init(KEY, tokens))
    axes = "data", "model", "context"
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(getattr(jax.sharding.AxisType, kind),) * 3)
    by_tokens = {"length": "context", "norm_length": "context"}
    rules = [(name, by_tokens.get(name, axis)) for name, axis in sharding.RULES]
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        got = run(sharding.init(model, KEY, tokens))
    close(got, expected, 2e-5)
