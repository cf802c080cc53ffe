"""Laws that hold for every public layer, block, model, mask, score and sampler."""

import importlib.util
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_mha.nnx
from experiments.common.counts import hlo, traffic
from experiments.measure import compiled
from experiments.plan import gpus
from flax_mha import (
    dot_product_attention,
    masks,
    models,
    sampling,
    scores,
    sharding,
    variants,
)
from flax_mha.base import numerics
from flax_mha.masks import Mask
from flax_mha.scores import ScoreMod
from tests.masks.catalogue import MASKS, Scene
from tests.support.catalogue import CATALOGUE, Entry
from tests.support.meshes import KINDS
from tests.support.oracle import float64

ROWS = 512  # of 16 tokens
# An argument, as the compiler for TPUs fails at some gradients of constants.
ONE = np.float32(1)
# A model's forward pass in bfloat16 moves gradients by up to 1.5%, a sum in it by 4% and more.
ERROR = {"bfloat16": 0.02, "float16": 0.01}
LEARNED = [name for name, entry in CATALOGUE.items() if entry.make]
CHIPS = "v5e", pytest.param("h200", marks=pytest.mark.gpu_compile)


def test_catalogue_holds_every_public_name() -> None:
    modules = (flax_mha, flax_mha.nnx, masks, models, sampling, scores, variants)
    public = {getattr(module, name) for module in modules for name in module.__all__}
    kinds = (nn.Module, nnx.Module, Mask, ScoreMod)
    classes = {x for x in public if inspect.isclass(x) and issubclass(x, kinds)}
    bases = {Mask, ScoreMod, flax_mha.nnx.Projection}
    functions = {getattr(sampling, name) for name in sampling.__all__} - {sampling.Sampling}
    assert {entry.value for entry in CATALOGUE.values()} == (classes - bases) | functions


def gradient(entry: Entry, dtype: Any, param_dtype: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the parameters, and the gradient of weighted outputs by them and the inputs."""
    params, apply = entry.opened(dtype, param_dtype)

    def loss(params: Any, one: jax.Array, *inputs: jax.Array) -> jax.Array:
        out = apply(params, *inputs).astype(jnp.float32)
        # The norms' outputs have a mean of 0.
        weights = np.random.default_rng(1).uniform(1 / 16, 1 / 8, (1, *out.shape[1:]))
        return jnp.sum(out * (one * jnp.asarray(weights, jnp.float32)))

    return params, jax.jit(jax.grad(loss))


def grows(entry: Entry, half: str, param_dtype: str) -> None:
    """The gradient of 8,192 tokens, 512 rows alike, is 512 times that of a row in float32."""
    params, in_half = gradient(entry, half, param_dtype)
    found = float64(nn.unbox(in_half(params, ONE, *entry.arrays(ROWS, half))))
    same = jax.tree.map(lambda x: np.asarray(x).astype(np.float32), params)
    inputs = [np.asarray(x) for x in entry.arrays(1, half)]
    inputs = [x.astype(np.float32) if x.dtype == half else x for x in inputs]
    wanted = gradient(entry, "float32", "float32")[1](same, ONE, *inputs)
    leaves = zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True)
    pairs = [(path, ROWS * np.asarray(x, np.float64), y) for (path, x), y in leaves]
    most = max(np.linalg.norm(x) for _, x, _ in pairs)
    for path, x, y in pairs:
        # Smaller ones are what is left of sums that cancel.
        if np.linalg.norm(x) > most / 50:
            assert abs(np.vdot(x, y) / np.vdot(x, x) - 1) < ERROR[half], path


def rounds(entry: Entry) -> None:
    """Parameters in half precision are drawn in float32: in bfloat16, draws have few values."""
    half, full = (entry.opened("float32", dtype)[0] for dtype in ("bfloat16", "float32"))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), half, full)


LAWS: dict[str, Callable[[Entry], None]] = {
    "parameters are rounded from float32": rounds,
    **{
        f"gradients in {half} of {given} parameters grow with the tokens": partial(
            grows, half=half, param_dtype=given
        )
        for half in ERROR
        for given in ("float32", half)
    },
}


@pytest.mark.sampled(0.004)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", LEARNED)
@jax.numpy_dtype_promotion("standard")  # as Flax's norms need
def test_law_holds(name: str, law: str) -> None:
    LAWS[law](CATALOGUE[name])


@pytest.mark.sampled(0)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", LEARNED)
@jax.numpy_dtype_promotion("standard")
def test_chips_add_up_in_float32(name: str, chip: str, half: str, optimized: None) -> None:
    """No reduction or scatter over tokens is in half precision. Experts alone are conditional."""
    # Without a wheel, a chip can't be compiled for.
    if gpus.lacking() if chip == "h200" else not importlib.util.find_spec("libtpu"):
        pytest.skip(f"needs the compiler of {chip}")
    target, entry = compiled.chip_of(chip), CATALOGUE[name]
    for param_dtype in ("float32", half):
        params, function = gradient(entry, half, param_dtype)
        arguments = target.place((params, ONE, *entry.arrays(ROWS, half)))
        text, _ = compiled.dumped(function.trace(*arguments).lower())
        module = hlo.Module(text)
        for run in module.runs():
            x = run.instruction
            assert x.opcode != "conditional" or name == "experts"
            # XLA for TPUs casts the sums of Flax's norms with half-precision parameters too early.
            if x.opcode in ("reduce", "scatter") and "norm/" not in x.rest:
                operands = [hlo.arrays(module.type_of(run.computation, y)) for y in x.operands]
                summed = max(array.size for arrays in operands for array in arrays)
                sums = hlo.arrays(x.type)
                # A sum in float32 may be written in half precision.
                (adds,) = re.findall(r"to_apply=%?([^\s,)]+)", x.rest)
                is_half = {"bf16", "f16"} & {y.dtype for y in hlo.arrays(module.root(adds).type)}
                assert not (is_half and summed >= ROWS * sums[0].size), x


def program(
    function: Callable[..., Any], arrays: Any, axis: int, kind: str, whole: Any = ()
) -> hlo.Module:
    """Return the program of a function of arrays, sharded along an axis over 8 GPUs.

    Args:
      function: the function.
      arrays: trees of arrays, which divide over the devices along the axis or lie on all.
      axis: 0 for the axis that the rules call "batch", 1 for "length".
      kind: the kind of the mesh's axis.
      whole: trees of arrays that lie on all devices, the first arguments of the function.
    """
    if reason := gpus.lacking():
        pytest.skip(reason)
    mesh = Mesh(np.array(gpus.of("h200", 8)), ("x",), axis_types=(KINDS[kind],))
    rules = dict.fromkeys(dict(sharding.RULES)) | {("batch", "length")[axis]: "x"}

    def place(x: jax.Array, is_whole: bool = False) -> jax.ShapeDtypeStruct:
        divides = x.ndim > axis and x.shape[axis] % mesh.size == 0
        spec = P(*[None] * axis, "x") if divides and not is_whole else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh), nn.logical_axis_rules(tuple(rules.items())):
        given = *jax.tree.map(partial(place, is_whole=True), whole), *jax.tree.map(place, arrays)
        text, _ = compiled.dumped(jax.jit(function).lower(*given))
    return hlo.Module(text)


def loops(*arguments: Any) -> list[str]:
    """Return the loops that XLA adds to a `program`. One of JAX's has a name in it."""
    found = (run.instruction for run in program(*arguments).runs())
    return [x.name for x in found if x.opcode == "while" and not x.source.endswith("while")]


each_axis = pytest.mark.parametrize("axis", [0, 1], ids=["batch", "length"])
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.sampled(0)
@pytest.mark.gpu_compile
@each_kind
@each_axis
@pytest.mark.parametrize("name", CATALOGUE)
@jax.numpy_dtype_promotion("standard")
def test_xla_adds_no_loop(name: str, axis: int, kind: str, optimized: None) -> None:
    """Such as a sum along a sharded axis that adds one token a step."""
    entry = CATALOGUE[name]
    if entry.make is None:
        share = 2 if entry.value is sampling.top_k else 0.5
        logits = jnp.zeros((8, 16))
        assert not loops(lambda x: entry.value(x, share), [logits], axis, kind)
    elif entry.inputs == "image" and axis:
        pytest.skip("an image has no axis of tokens")
    else:
        params, function = gradient(entry, "bfloat16", "float32")
        arrays = entry.arrays(8, "bfloat16")
        assert not loops(function, arrays, axis, kind, (params, jnp.asarray(ONE)))


@pytest.mark.sampled(0)
@pytest.mark.gpu_compile
@each_kind
@each_axis
@pytest.mark.parametrize("name", [*MASKS, "runs"])
def test_xla_adds_no_loop_for_arrays_of_masks(
    name: str, axis: int, kind: str, optimized: None
) -> None:
    at = Scene((8,), 16, 16, N=2)
    mask = masks.Segments(at.ids(16), runs=True) if name == "runs" else MASKS[name](at)[0]
    leaves, tree = jax.tree.flatten(mask)

    def attend(q: jax.Array, *leaves: jax.Array) -> jax.Array:
        mask = tree.unflatten(leaves)
        return jax.grad(lambda q: jnp.sum(dot_product_attention(q, q, q, mask=mask)))(q)

    assert not loops(attend, [jnp.zeros((8, 16, 2, 4)), *map(jnp.asarray, leaves)], axis, kind)


@pytest.mark.sampled(0)
@pytest.mark.gpu_compile
@each_kind
@pytest.mark.parametrize("limit", [sampling.top_k, sampling.top_p])
def test_searches_of_tokens_start_few_kernels(limit: Any, kind: str, optimized: None) -> None:
    share = 50 if limit is sampling.top_k else 0.9
    module = program(lambda x: limit(x, share), [jnp.zeros((8, 32768))], 1, kind)
    assert sum(one.times for one in traffic.walk(module)) < 64


@pytest.mark.gpu_compile
@pytest.mark.slow
def test_xla_sums_along_a_sharded_axis_in_loops(optimized: None) -> None:
    """`flax_mha.sharding.prefix_sums` is there for this, and the two tests above find it."""
    assert loops(lambda x: jnp.cumsum(x, 1), [jnp.zeros((8, 16))], 1, "Auto")


def test_gradient_of_a_bias_is_a_float32_sum_on_tpus(optimized: None) -> None:
    """By a plain cast to bfloat16 libtpu 0.0.52 makes it a bfloat16 sum, even after a barrier."""
    pytest.importorskip("libtpu")
    chip = compiled.chip_of("v5e")
    x, bias = chip.array(64, 128, 256, dtype="bfloat16"), chip.array(256, dtype="bfloat16")

    def gradient(bias: jax.Array, x: jax.Array) -> jax.Array:
        return jax.vjp(lambda bias: numerics.plus(x, bias), bias)[1](x)[0]

    text, _ = compiled.dumped(jax.jit(gradient).lower(bias, x))
    sums = [x.instruction for x in hlo.Module(text).runs() if x.instruction.opcode == "reduce"]
    assert {array.dtype for one in sums for array in hlo.arrays(one.type)} == {"f32"}
