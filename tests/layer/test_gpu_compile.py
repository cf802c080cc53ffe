"""A layer on NVIDIA GPUs, compiled without one.

It needs the wheels of the extra gpu-compile. The collectives equal the ones on TPUs: see
test_tpu_collectives.py and docs/sharding.md.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.common.counts import work
from experiments.common.counts.hlo import Module
from experiments.measure import compiled as measured
from experiments.measure import programs
from experiments.measure.programs import Chip
from experiments.plan import compiled, gpus, roofline
from experiments.plan.collectives import read
from flax_mha import (
    MultiHeadAttention,
    MultiHeadDotProductAttention,
    dot_product_attention,
    masks,
    sharding,
)
from tests.support import lowered_layers
from tests.support.catalogue import CATALOGUE
from tests.support.meshes import KINDS, described

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.skipif(gpus.lacking() is not None, reason=str(gpus.lacking())),
]
N, H, T, D, ROWS = 8, 64, 512, 256, 2  # rows per device


@pytest.mark.parametrize(
    ("chip", "kind", "heads"), [("a100", "Auto", 4), ("h200", "Explicit", 4), ("b200", "Auto", 8)]
)
def test_layer_calls_cudnn_and_collectives_match_formula(
    optimized: None, chip: str, kind: str, heads: int
) -> None:
    """`auto` takes cuDNN for absent GPUs. Heads and rows are sharded."""
    layer = MultiHeadAttention(N, head_dim=H, mask=masks.Causal(), dtype=jnp.bfloat16)
    devices = np.array(gpus.of(chip, 8)).reshape(-1, heads)
    mesh = Mesh(devices, ("data", "model"), axis_types=(KINDS[kind],) * 2)
    shape = (ROWS * len(devices), T, D)
    gradient, _, parameters = lowered_layers.traced(layer, mesh, shape, jnp.bfloat16)
    text, found = compiled.dumped(gradient.lower())
    assert names(text) == CUDNN

    sent = read(text, mesh.size)
    BTD = 2 * ROWS * T * D
    groups = [set(one.groups[0]) for one in sent]
    over_heads = [one for one, g in zip(sent, groups, strict=True) if g == set(range(heads))]
    over_rows = [one for one, g in zip(sent, groups, strict=True) if g == {*range(0, 8, heads)}]
    assert [(one.kind, one.bytes) for one in over_heads] == [("all-reduce", BTD)] * 2
    assert len(sent) == len(over_heads) + len(over_rows) * (len(devices) > 1)
    assert {one.kind for one in sent} == {"all-reduce"}
    mine = N // heads
    if len(devices) > 1:
        # Gradients of kernels are in the dtype of the matmuls, those of biases in float32.
        biases = 3 * mine * H + D
        assert sum(one.bytes for one in over_rows) == parameters / 2 + 2 * biases

    # 12 matmuls of D by H per token and head, and 2 of all scores forward, 5 backward.
    projections, attention = 12 * ROWS * T * D * mine * H, 7 * ROWS * mine * T**2 * H
    assert work.flops(Module(text)) == 2 * (projections + attention)
    memory = found.memory_analysis()
    assert memory.temp_size_in_bytes > 4 * BTD
    links = roofline.network(list(mesh.devices.flat))
    assert links.seconds(over_heads[0]) == over_heads[0].sent / links.chip.link


def cudnn_calls(text: str) -> list[str]:
    """Return the attributes of cuDNN's calls."""
    found = Module(text).runs()
    return [x.instruction.rest for x in found if x.times and "__cudnn$" in x.instruction.rest]


def names(text: str) -> list[str]:
    return [re.findall(r"__cudnn\$\w+", call)[0] for call in cudnn_calls(text)]


CUDNN = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
WITH_BIAS = ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]


@pytest.mark.parametrize(
    ("chip", "calls", "window"),
    [("a100", WITH_BIAS, 64), ("h200", CUDNN, None), ("h200", CUDNN, 64), ("b200", CUDNN, None)],
)
def test_packed_documents_call_cudnn_once_each_way(
    optimized: None, chip: str, calls: list[str], window: int | None
) -> None:
    """In cuDNN's ragged layout, from Hopper on, with sharded rows and grouped heads, and sinks.

    Before Hopper a bias hides the other documents.
    """
    mask = masks.Causal() & masks.Documents(np.array([200, 1, 311]))
    mask = mask if window is None else mask & masks.Window(window)
    layer = MultiHeadAttention(
        N, head_dim=H, num_kv_heads=N // 2, mask=mask, sinks=True, dtype=jnp.bfloat16
    )
    mesh = Mesh(np.array(gpus.of(chip, 4)).reshape(2, 2), ("data", "model"))
    gradient = lowered_layers.traced(layer, mesh, (4, T, D), jnp.bfloat16).gradient
    text, _ = compiled.dumped(gradient.lower())
    assert names(text) == calls
    found = [re.findall(r'"max_seg_per_batch":"?(\d+)', call)[0] for call in cudnn_calls(text)]
    assert found == (["3"] if calls == CUDNN else ["1"]) * 2
    # The lse of each document of both rows, for half of the heads.
    assert (f"f32[6,{N // 2},{T}]" in text) == (calls == CUDNN)


@pytest.mark.parametrize(
    "mask",
    [masks.Causal(), masks.Documents(np.array([3000, 5192]))],
    ids=["causal", "documents"],
)
def test_isolated_nan_takes_no_memory_for_pairs(optimized: None, mask: masks.Mask) -> None:
    """The pairs that NaN may reach are computed where they are read."""
    layer, length = MultiHeadAttention(2, head_dim=H, mask=mask, dtype=jnp.bfloat16), 8192
    mesh = Mesh(np.array(gpus.of("h200", 1)).reshape(1, 1), ("data", "model"))
    gradient = lowered_layers.traced(layer, mesh, (1, length, 2 * H), jnp.bfloat16).gradient
    text, found = compiled.dumped(gradient.lower())
    assert len(names(text)) == 2
    assert found.memory_analysis().temp_size_in_bytes < length**2 / 2


@pytest.mark.parametrize(
    ("chip", "length", "kernel"),
    [("a100", 2, "ring"), ("h200", 4, "ring"), ("b200", 4, "ring"), ("h200", 4, "usp")],
)
def test_ring_calls_cudnn_in_each_hop(optimized: None, chip: str, length: int, kernel: str) -> None:
    """A device's own block has the causal mask, the others none."""
    heads = 2 if kernel == "usp" else 1
    mesh = Mesh(np.array(gpus.of(chip, length * heads)).reshape(length, heads), ("outer", "inner"))
    over = ("outer", "inner")
    rules = [("length", over), ("heads", None), ("kv_heads", None), ("batch", None)]
    shape = (1, 128 * length, N, H)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(None, over)))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = dot_product_attention(q, k, v, mask=masks.Causal(), kernel=kernel)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        text, _ = compiled.dumped(jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x))
    found = "\n".join(cudnn_calls(text))
    kinds = Counter(re.findall(r'"__cudnn\$(\w+)".*?"mask_type":"(\w+)"', found))
    # One pass each way per block: out and lse are saved, and nothing is recomputed.
    assert kinds == {
        (kind, mask): count
        for kind in ("fmhaSoftmax", "fmhaSoftmaxBackward")
        for mask, count in (("PADDING_CAUSAL", 1), ("PADDING", length - 1))
    }
    exchanged = {"all-to-all"} if kernel == "usp" else set()
    assert {one.kind for one in read(text, mesh.size)} == {"collective-permute"} | exchanged


@pytest.mark.parametrize(("chip", "arrays"), [("a100", 3), ("h200", 3), ("b200", 2)])
def test_float32_memory(optimized: None, chip: str, arrays: int) -> None:
    """Two or three score arrays where `auto` takes plain einsums, O(T) beyond, as the docs say."""
    target = Chip(gpus.of(chip, 1)[0], is_gpu=True)

    def taken(length: int, heads: int, kernel: str = "auto") -> float:
        """Return the memory in units of the inputs. The scores are length/H of them."""
        x = target.array(1, length, heads, H, dtype=jnp.float32)

        def loss(*qkv: jax.Array) -> jax.Array:
            out = dot_product_attention(*qkv, mask=masks.Causal(), kernel=kernel)
            return jnp.sum(jnp.sin(out))

        entry = programs.Entry("", "", "", jax.grad(loss, (0, 1, 2)), (x, x, x))
        return measured.measure(target, entry)["held"] * 2**20 / (4 * length * heads * H)

    least = arrays * 1024 / H
    assert least <= taken(1024, 16) == taken(1024, 16, "reference") < least + 4
    for length, heads in ((2048, 256), (4096, 16), (8192, 16)):
        assert taken(length, heads) < 4


def test_projections_are_not_merged_and_sliced(optimized: None) -> None:
    """Forward, each product reads x and its kernel and writes once: 3, 3 and 1 for the output."""
    chip = Chip(gpus.of("h200", 1)[0], is_gpu=True)
    layer = MultiHeadAttention(16, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    x = chip.array(4, 1024, 2048)
    variables = chip.initial(layer, x)
    entry = programs.Entry("", "", "", layer.apply, (variables, x))
    products, attention, lse = 4 * (16 + 8 + 16), 4 * 16, 0.25
    moved = measured.measure(chip, entry)["MiB"]
    assert moved == pytest.approx(products + attention + lse, abs=0.1)


@pytest.mark.parametrize(("dtype", "rate"), [("float32", 0.0), ("bfloat16", 0.1)])
@jax.numpy_dtype_promotion("standard")
def test_reference_moves_no_more_than_a_layer_of_flax(
    optimized: None, dtype: str, rate: float
) -> None:
    """Count both programs where `auto` takes `reference`: float32, and dropout of short rows."""
    chip = Chip(gpus.of("h200", 1)[0], True)
    x, key = chip.array(8, T // 2, D, dtype=dtype), chip.array(2, dtype=jnp.uint32)

    def moved(cls: Any, **more: Any) -> list[float]:
        layer = cls(D // H, dtype=dtype, dropout_rate=rate, deterministic=not rate, **more)

        def apply(variables: Any, x: jax.Array, key: jax.Array) -> jax.Array:
            return layer.apply(variables, x, rngs={"dropout": jax.random.wrap_key_data(key)})

        def loss(*arguments: Any) -> jax.Array:
            return (apply(*arguments).astype(jnp.float32) ** 2).mean()

        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
        variables = chip.place(jax.eval_shape(layer.init, rngs, jnp.ones(x.shape, dtype)))
        return [
            measured.measure(chip, programs.Entry("", "", "", function, (variables, x, key)))["MiB"]
            for function in (apply, jax.grad(loss, (0, 1)))
        ]

    ours = moved(MultiHeadDotProductAttention)
    flax = moved(nn.MultiHeadDotProductAttention, force_fp32_for_softmax=True)
    assert all(x < 1.02 * y for x, y in zip(ours, flax, strict=True)), (ours, flax)


@pytest.mark.parametrize(
    ("chip", "kernel"),
    [("a100", "reference"), ("h200", "reference"), ("h200", "blockwise"), ("b200", "blockwise")],
)
def test_float32_matmuls_use_tf32_by_default(
    optimized: None, chip: str, kernel: str, tmp_path: Path
) -> None:
    """TF32 has a mantissa of ten bits. With `precision="highest"` no matmul uses it."""
    mesh = Mesh(np.array(gpus.of(chip, 1)), ("data",))
    x = jax.ShapeDtypeStruct((1, 256, 2, H), jnp.float32, sharding=NamedSharding(mesh, P()))
    tensor_cores = {}
    for precision in (None, "highest"):

        def loss(q: jax.Array, precision: str | None = precision) -> jax.Array:
            out = dot_product_attention(q, q, q, kernel=kernel, precision=precision)
            return jnp.sum(jnp.sin(out))

        folder = tmp_path / str(precision)
        options = {"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"}
        jax.jit(jax.grad(loss)).lower(x).compile(compiler_options=options)
        ptx = "".join(path.read_text() for path in folder.glob("*.ptx"))
        assert "fma.rn.f32" in ptx
        tensor_cores[precision] = set(re.findall(r"mma\.[\w.:]*?(tf32|bf16|f16)", ptx))
    assert tensor_cores == {None: {"tf32"}, "highest": set()}


@pytest.mark.parametrize(("program", "most"), [("decode-64", 1.2), ("decode-scan", 1.7)])
@jax.numpy_dtype_promotion("standard")
def test_step_reads_cache_and_parameters_little_more_than_once(
    optimized: None, program: str, most: float
) -> None:
    """64 tokens by cuDNN, of the layout of the cache; a layer's part of a stack where it is."""
    chip = Chip(gpus.of("h200", 1)[0], True)
    entry = next(x for x in programs.entries(chip, [program]) if x.contestant == "ours")
    least = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(entry.arguments[:2]))
    assert measured.measure(chip, entry)["MiB"] * 2**20 < most * least


SHARDED = {
    "batch": {"batch": "all"},
    "fsdp": dict.fromkeys(["batch", "embed"], "all"),
    "norm_length": dict.fromkeys(["norm_length", "heads", "kv_heads", "mlp"], "all"),
}
# Not the one with a single key/value head.
STACKED = [
    name for name, entry in CATALOGUE.items()
    if entry.make and entry.inputs == "features" and issubclass(entry.value, nn.Module)
    and name not in ("encoder", "position embedding", "layer of all options")
]  # fmt: skip


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", SHARDED)
@pytest.mark.parametrize("name", STACKED)
@jax.numpy_dtype_promotion("standard")
def test_two_gpus_keep_half_for_the_backward_pass(
    optimized: None, name: str, rule: str, kind: str
) -> None:
    """A further layer of a scan keeps no weights or activations whole that a rule shards."""
    if (name, rule) == ("experts", "norm_length"):
        pytest.skip("experts take tokens of all devices")
    make = CATALOGUE[name].make
    assert make is not None
    # Under "batch", of a mixed precision: no kernel is kept cast.
    param_dtype = "float32" if rule == "batch" else "bfloat16"
    layer, shape = make(dtype="bfloat16", param_dtype=param_dtype), (8, 64, 512)
    mesh = Mesh(np.array(gpus.of("h200", 2)), "all", axis_types=(KINDS[kind],))

    def loss(variables: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(stack.apply(variables, x).astype(jnp.float32)))

    held = []
    for rules in ({}, SHARDED[rule]):
        for repeats in (2, 4):
            stack = lowered_layers.Residual(layer, repeats)
            named = tuple((dict.fromkeys(dict(sharding.RULES)) | rules).items())
            with jax.set_mesh(mesh), nn.logical_axis_rules(named):
                spec = sharding.spec(shape, ("batch", "norm_length", None))
                place = NamedSharding(mesh, P(*(x if x == "all" else None for x in spec)))
                x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
                _, found = compiled.dumped(jax.jit(jax.grad(loss)).lower(described(stack, x), x))
            held.append(found.memory_analysis().temp_size_in_bytes)
    # And a share of the shards themselves.
    assert held[3] - held[2] < 0.62 * (held[1] - held[0])
