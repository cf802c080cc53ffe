"""Programs of `jax.export` with symbolic batch and lengths, against NumPy in float64."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import (
    CacheConfig,
    Capture,
    DecoderBlock,
    LanguageModel,
    MultiHeadAttention,
    Platform,
    cache,
    dot_product_attention,
    explain,
    kernels,
    masks,
    scores,
    variants,
)
from flax_mha.models import Decoder, TokenEmbedding
from flax_mha.positions import PositionEmbedding, Rotary
from tests.support import oracle
from tests.support.meshes import on
from tests.support.oracle import error, random_like

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
B, D = 2, 8
X = np.ones((1, 4, D), np.float32)
LAYER = MultiHeadAttention(2, num_kv_heads=1, rotary=Rotary())
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("checkpointed", "decode")]


def exported(
    fn: Callable[..., Any], *shapes: str, dtypes: Any = (), bounds: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Return the exported program for axes such as "b, n, 8"."""
    scope = export.SymbolicScope(bounds)
    dtypes = dtypes or ["float32"] * len(shapes)
    args = [
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return export.export(jax.jit(fn))(*args).call


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def attended(kernel: str) -> Callable[..., Any]:
    def call(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, dout: jax.Array) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            out, seen = dot_product_attention(
                q, k, v, mask=masks.Causal() & masks.Lengths(lengths), kernel=kernel,
                q_positions=2, capture=Capture(("entropy",)),
            )  # fmt: skip
            return (out * dout).sum(), (out, seen["entropy"])

        grads, outs = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return *outs, *grads

    return call


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("kernel", ["reference", "blockwise", *SLOW])
def test_exported_kernels_match_formula(kernel: str) -> None:
    """Outputs and gradients. All but `reference` have several tiles."""
    n = "3" if kernel == "decode" else "n"
    keyed = "b, m, 1, 4"
    call = exported(
        attended(kernel), f"b, {n}, 2, 4", keyed, keyed, "b", f"b, {n}, 2, 4",
        dtypes=["float32"] * 3 + ["int32", "float32"],
    )  # fmt: skip
    sizes = {"reference": (5, 7), "decode": (3, 1100)}
    T, S = sizes.get(kernel, (300, 1100))
    q, dout, k, v = normal(B, T, 2, 4), normal(B, T, 2, 4), normal(B, S, 1, 4), normal(B, S, 1, 4)
    lengths = np.array([S, 3], np.int32)
    out, entropy, *grads = call(q, k, v, lengths, dout)
    i, j = np.arange(T)[:, None] + 2, np.arange(S)
    allowed = (j <= i) & (j < lengths[:, None, None, None])
    expected, _, weights = oracle.attention(q, k, v, allowed=allowed)
    assert error(out, expected) < 1e-5
    some = np.where(weights > 0, weights, 1.0)
    np.testing.assert_allclose(entropy, -(some * np.log(some)).sum(-1), atol=1e-5)
    derived = oracle.attention_gradients(q, k, v, cotangent=dout, allowed=allowed)
    assert max(map(error, grads, derived[:3])) < 1e-5


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("tokens", ["1", "n"])
def test_exported_decoding(tokens: str) -> None:
    """A step, and a prompt that provably fits. For other prompts the error states the rule."""
    layer, T = LAYER.clone(decode=True), 1 if tokens == "1" else 3
    params = random_like(jax.eval_shape(LAYER.init, KEY, X))

    def step(x: jax.Array, key: jax.Array, value: jax.Array, length: jax.Array) -> Any:
        held = {"cache": {"kv": cache.KVCache(key, value, length)}}
        y, new = layer.apply({**params, **held}, x, mutable=["cache"])
        return y, new["cache"]["kv"].length

    slots = f"b, 1, 9, {D // 2}"
    axes = f"b, {tokens}, {D}", slots, slots, "b"
    dtypes = ["float32"] * 3 + ["int32"]
    bounds = ("n <= 9",) if tokens == "n" else ()
    call = exported(step, *axes, dtypes=dtypes, bounds=bounds)
    given = normal(B, T, D), normal(B, 1, 9, 4), normal(B, 1, 9, 4), np.array([3, 5], np.int32)
    for ours, expected in zip(call(*given), jax.jit(step)(*given), strict=True):
        assert error(ours, expected) < 1e-5
    if tokens == "n":
        with pytest.raises(ValueError, match=r"at most S where.*got \(b, n, 1, 4\)"):
            exported(step, *axes, dtypes=dtypes)


TPU, H200 = Platform("tpu", "TPU v5 lite"), Platform("gpu", "NVIDIA H200", (9, 20, 0))


@pytest.mark.parametrize(("platform", "kernels"), [(TPU, ("splash", "flex")), (H200, ("cudnn",))])
def test_gpu_and_tpu_kernels_refuse_symbolic_sizes(
    platform: Platform, kernels: tuple[str, ...]
) -> None:
    b, n = export.symbolic_shape("b, n")
    q = jax.ShapeDtypeStruct((b, n, 2, 64), jnp.bfloat16)
    found = explain(q, q, q, mask=masks.Causal(), platform=platform)
    assert found.chosen == "blockwise"
    for name in kernels:
        assert found.refused[name].startswith("needs static sizes, got q (b, n, 2, 64)")


CUDNN = [
    export.DisabledSafetyCheck.custom_call(name)
    for name in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward", "LayoutConstraint")
]


@pytest.mark.parametrize(
    ("platform", "lowered", "call"),
    [(TPU, "tpu", "tpu_custom_call"), (H200, "cuda", "__cudnn$fmhaSoftmaxBackward")],
)
def test_exported_gradient_has_the_kernels_of_its_platform_only(
    platform: Platform, lowered: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = jax.ShapeDtypeStruct((1, 1024, 2, 128), jnp.bfloat16)

    @jax.jit
    def gradient(x: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            return dot_product_attention(x, x, x, mask=masks.Causal()).sum(dtype=jnp.float32)

        return jax.grad(loss)(x)

    def text(*platforms: str) -> str:
        return export.export(gradient, platforms=platforms, disabled_checks=CUDNN)(x).mlir_module()

    with caplog.at_level("INFO", "flax_mha"):
        assert call not in text(lowered)
    assert "blockwise computes attention" in caplog.text
    with kernels.use(platform=platform):
        assert call in text(lowered)
        for others in (("cpu",), (lowered, "cpu")):
            with pytest.raises(ValueError, match=r"must be lowered only for it, .*; export one"):
                text(*others)


MODEL = LanguageModel(
    TokenEmbedding(11, D), Decoder(2, DecoderBlock(LAYER, 16), scan=True),
    position_embedding=PositionEmbedding(max_length=16),
)  # fmt: skip
MODULES: dict[str, Any] = {
    "layer": LAYER,
    "sigmoid": MultiHeadAttention(2, normalizer="sigmoid"),
    "chosen": variants.ChosenBlocksAttention(2, block=2, count=2),
    "chosen by blocks": variants.ChosenBlocksAttention(2, block=2, count=9, query_block=2),
    "model": MODEL,
}


SLOW_MODULES = [pytest.param(name, marks=pytest.mark.slow) for name in [*MODULES][3:]]


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("name", [*[*MODULES][:3], *SLOW_MODULES])
def test_exported_modules_match(name: str) -> None:
    """Outputs with lengths and gradients match programs with fixed sizes."""
    module, is_model = MODULES[name], name == "model"
    given = np.arange(B * 7).reshape(B, 7) % 11 if is_model else normal(B, 7, D)
    variables = random_like(jax.eval_shape(module.init, KEY, given))
    lengths = np.array([7, 2], np.int32)

    def call(x: jax.Array, lengths: jax.Array) -> Any:
        def loss(variables: Any) -> Any:
            out = module.apply(variables, x, lengths=lengths)
            return jnp.sin(out).sum(), out

        return jax.grad(loss, has_aux=True)(variables)

    shape, dtype = ("b, n", "int32") if is_model else ("b, n, 8", "float32")
    program = exported(call, shape, "b", dtypes=[dtype, "int32"])
    args = given.astype(dtype), lengths
    found, wanted = program(*args), jax.jit(call)(*args)
    for actual, expected in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def saved(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the results of an exported program, by way of its bytes."""
    pytest.importorskip("flatbuffers")
    return export.deserialize(export.export(jax.jit(fn))(*args).serialize()).call(*args)


@pytest.mark.sampled(0.08)
def test_exported_programs_take_and_return_caches_masks_and_scores() -> None:
    layer = MultiHeadAttention(
        2, decode=True, cache=CacheConfig("int8", slots=3), mask=masks.Window(2, 0)
    )
    x = normal(B, 4, D)
    variables = jax.jit(layer.init)(KEY, x)

    def step(variables: Any, x: jax.Array) -> Any:
        return layer.apply(variables, x, return_kv=True, mutable="cache")

    (out, kv), held = saved(step, variables, x[:, :1])
    (expected, _), new = jax.jit(step)(variables, x[:, :1])
    np.testing.assert_array_equal(out, expected)
    assert jax.tree.structure(held) == jax.tree.structure(new)
    assert held["cache"]["kv"].window == kv.window == 2
    q = x.reshape(B, 4, 2, 4)
    mask = masks.Neighborhood((2, 2), (1, 2)) | masks.Segments(np.arange(4) // 3)
    mods = (scores.SoftCap(5.0), scores.RelativeBias(np.ones((2, 32), np.float32)))

    def attend(mask: Any, mods: Any) -> Any:
        return dot_product_attention(q, q, q, mask=mask, scores=mods), mask

    out, same = saved(attend, mask, mods)
    np.testing.assert_array_equal(out, jax.jit(attend)(mask, mods)[0])
    assert jax.tree.structure(same) == jax.tree.structure(mask)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["reference", "checkpointed"])
def test_exported_programs_keep_second_derivatives(kernel: str) -> None:
    pytest.importorskip("flatbuffers")
    layer = LAYER.clone(kernel=kernel)
    params = random_like(jax.eval_shape(layer.init, KEY, X))

    def call(x: jax.Array) -> Any:
        return layer.apply(params, x, mask=masks.Causal())

    def twice(call: Callable[..., Any], x: jax.Array) -> jax.Array:
        def slope(x: jax.Array) -> jax.Array:
            return (jax.grad(lambda x: (call(x) ** 2).sum())(x) ** 2).sum()

        return jax.jit(jax.grad(slope))(x)

    x = normal(B, 5, D)
    axes = jax.ShapeDtypeStruct(export.symbolic_shape("b, n, 8"), x.dtype)
    data = export.export(jax.jit(call))(axes).serialize(vjp_order=2)
    assert error(twice(export.deserialize(data).call, x), twice(call, x)) < 1e-5


@pytest.mark.sampled(0.08)
def test_program_of_explicit_mesh_runs_on_a_mesh_of_another_shape() -> None:
    pytest.importorskip("flatbuffers")
    params = random_like(jax.eval_shape(LAYER.init, KEY, X))
    x = normal(8, 6, D)
    with on("Explicit", shape=(4, 2)) as mesh:
        placed = jax.device_put(x, NamedSharding(mesh, P("data")))
        data = export.export(jax.jit(lambda x: LAYER.apply(params, x)))(placed).serialize()
    other = NamedSharding(jax.make_mesh((8,), ("rows",), (AxisType.Auto,)), P("rows"))
    out = jax.jit(export.deserialize(data).call)(jax.device_put(x, other))
    assert error(out, LAYER.apply(params, x)) < 1e-5


def test_functions_in_arguments_of_exported_programs_are_an_error() -> None:
    mask = masks.Predicate(lambda row, head, i, j: i >= j)
    with pytest.raises(TypeError, match=r"<func.* as a data type"):
        saved(lambda mask: 0.0, mask)


READ = """
import sys, jax, numpy as np, flax_mha.cache
exported = jax.export.deserialize(open(sys.argv[1], "rb").read())
cache = flax_mha.cache.KVCache.empty((2,), 4, 2, 4, window=2)
q = np.ones((2, 1, 2, 4), np.float32)
print(exported.call(cache, q)[1].window)
"""


@pytest.mark.slow
def test_exported_programs_are_read_in_a_fresh_process(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    held, q = cache.KVCache.empty((2,), 4, 2, 4, window=2), jnp.ones((2, 1, 2, 4))
    program = export.export(jax.jit(lambda held, q: held.extend(q, q, q)))(held, q)
    (tmp_path / "program").write_bytes(program.serialize())
    command = [sys.executable, "-c", READ, str(tmp_path / "program")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "2"
