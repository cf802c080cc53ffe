"""The way of one input through the layer, counted: the functions that a reader has to follow."""

import ast
import contextlib
import dataclasses
import functools
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import flax_mha
from flax_mha import MultiHeadAttention, masks, sharding
from flax_mha.kernels.reference import multiply

ROOT = Path(flax_mha.__file__).parent


def test_an_input_seldom_comes_back_to_a_file_it_has_left() -> None:
    layer, x = MultiHeadAttention(8), jnp.ones((2, 17, 64))
    variables = layer.init(jax.random.key(0), x)

    def call(x: jax.Array) -> jax.Array:
        return layer.apply(variables, x, mask=masks.Causal())

    jax.make_jaxpr(call)(x[:, 1:])  # What is imported on the way is now there.
    stays = _stays(call, x)
    assert stays[0] == "linen.py"
    assert {"layer/core.py", "layer/linear.py", "kernels/choose.py", "kernels/reference.py"} <= set(
        stays
    )
    assert len(stays) - len(set(stays)) <= 10, "\n".join(stays)


@pytest.mark.parametrize("devices", [1, 2])
def test_few_functions_stand_between_a_call_and_its_product(devices: int) -> None:
    q = jax.ShapeDtypeStruct((2, 16, 4, 8), jnp.float32)
    mesh = jax.make_mesh((1, devices), ("data", "model"), devices=jax.devices()[:devices])
    way: list[str] = []

    def look(frame: FrameType | None, event: str, _: Any) -> None:
        if frame and event == "call" and frame.f_code is multiply.__code__ and not way:
            while frame:
                if frame.f_code.co_filename.startswith(str(ROOT)):
                    way.insert(0, frame.f_code.co_name)
                frame = frame.f_back

    def call(q: jax.Array) -> jax.Array:
        return flax_mha.dot_product_attention(q, q, q, mask=masks.Causal(), kernel="reference")

    ambient = jax.set_mesh(mesh) if devices > 1 else contextlib.nullcontext()
    with ambient, nn.logical_axis_rules(sharding.RULES):
        sys.setprofile(look)
        try:
            jax.eval_shape(call, q)
        finally:
            sys.setprofile(None)
    on_mesh = ["run", "run_on_shards", "inside"] if devices > 1 else []
    product = ["run", "attend", "scores", "multiply_finite", "multiply"]
    assert way == ["dot_product_attention", *on_mesh, *product]


def _stays(call: Any, x: jax.Array) -> list[str]:
    """The files, one after the other, whose functions are given x or what was made of it."""
    files: list[str] = []
    inside: list[FrameType] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if inside:
            if event == "return" and frame is inside[0]:
                inside.clear()
        elif event == "call" and code.co_filename.startswith(str(ROOT)):
            if code.co_name == "initialize":
                # Flax calls initializers for the shapes of parameters: no input goes there.
                inside.append(frame)
            elif any(_is_traced(frame.f_locals.get(name)) for name in _arguments(code)):
                file = Path(code.co_filename).relative_to(ROOT).as_posix()
                if files[-1:] != [file]:
                    files.append(file)

    sys.setprofile(look)
    try:
        jax.make_jaxpr(call)(x)
    finally:
        sys.setprofile(None)
    return files


def _arguments(code: CodeType) -> tuple[str, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[: count + bool(code.co_flags & 4) + bool(code.co_flags & 8)]


def _is_traced(x: Any) -> bool:
    """Whether it is a traced array, or holds one."""
    if isinstance(x, dict):
        return any(map(_is_traced, x.values()))
    if isinstance(x, tuple | list):
        return any(map(_is_traced, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type | nn.Module):
        return any(_is_traced(getattr(x, field.name, None)) for field in dataclasses.fields(x))
    return isinstance(x, jax.core.Tracer)


OPTIONS = (
    "broadcast_dropout", "capture", "dropout_rate", "head_mask", "normalizer", "param_dtype",
    "partitioned", "project_out", "qk_norm", "rotary", "sinks", "use_bias",
)  # fmt: skip
# Which give options to layers, as users do; and functions of Flax's signatures.
CALLERS = ("interop", "kernels", "models")
FLAX = "attention_fn.py"


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_known_to_few_files(option: str) -> None:
    files = [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] not in CALLERS
        if path.name != FLAX and option in _names(path)
    ]
    assert 1 <= len(files) <= 5, files


@functools.cache
def _names(path: Path) -> set[str]:
    """Return the names in a file's code: of values, attributes, arguments, and as strings."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("id", "attr", "arg", "value"):
            name = getattr(node, field, None)
            names |= {name} if isinstance(name, str) else set()
    return names


@pytest.mark.parametrize(
    ("kind", "most"), [(None, 9), (AxisType.Auto, 12), (AxisType.Explicit, 12)]
)
def test_the_product_of_queries_and_keys_is_near(kind: AxisType | None, most: int) -> None:
    """Frames of ours from the layer's call to the matrix product q·kᵀ."""
    T, H = 29, 8
    layer, x = MultiHeadAttention(4, mask=masks.Causal(), kernel="reference"), jnp.ones((2, T, 32))
    with contextlib.ExitStack() as stack:
        if kind is not None:
            stack.enter_context(jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), (kind,) * 2)))
            stack.enter_context(nn.logical_axis_rules(sharding.RULES))
        variables = sharding.init(layer, jax.random.key(0), x)
        depths: list[list[str]] = []

        def look(frame: FrameType, event: str, _: Any) -> None:
            if event != "call" or frame.f_code.co_name != "dot_general":
                return
            sides = [getattr(frame.f_locals.get(side), "shape", ()) for side in ("lhs", "rhs")]
            if all(T in shape and H in shape for shape in sides):
                depths.append(_ours(frame))

        jax.clear_caches()  # Functions of JAX that it has traced would not be called.
        sys.setprofile(look)
        try:
            jax.eval_shape(layer.apply, variables, x)
        finally:
            sys.setprofile(None)
    assert 5 <= len(depths[0]) <= most, depths[0]


def _ours(frame: FrameType | None) -> list[str]:
    names = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(ROOT)):
            names.append(f"{frame.f_code.co_filename}: {frame.f_code.co_name}")
        frame = frame.f_back
    return names
