"""The call path of one input through the layer, in files and functions to follow."""

import ast
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

import flax_mha.nnx
from flax_mha import MultiHeadAttention, masks, sharding
from flax_mha.kernels.xla.reference import scores

ROOT = Path(flax_mha.__file__).parent


@pytest.mark.parametrize(("library", "T"), [("linen", 23), ("nnx", 27)])
def test_a_call_passes_few_frames_and_files(library: str, T: int) -> None:
    """Frames and files from the call to the product q·kᵀ, and files that the inputs enter."""
    H, x = 16, jnp.ones((2, T, 64))  # No other product has these sizes.
    if library == "nnx":
        call: Any = flax_mha.nnx.MultiHeadAttention(4, 64, mask=masks.Causal(), rngs=nnx.Rngs(0))
    else:
        layer = MultiHeadAttention(4, mask=masks.Causal())
        call = functools.partial(layer.apply, layer.init(jax.random.key(0), x[:, 1:]))
    jax.make_jaxpr(call)(x[:, 2:])  # Load the modules that the call imports.
    path, *_ = _products(lambda: jax.make_jaxpr(lambda x: call(x))(x), T, H)
    entered = _entered(call, x)
    files = [frame.partition(": ")[0] for frame in path]
    assert {f"{library}.py", "kernels/xla/reference.py"} <= {*files} <= {*entered}
    assert len(path) <= 8, path
    assert len({*files}) <= 6, files
    assert len({*entered}) <= 25, sorted({*entered})


@pytest.mark.parametrize("devices", [1, 2])
def test_few_frames_between_call_and_matmul(devices: int) -> None:
    q = jax.ShapeDtypeStruct((2, 16, 4, 8), jnp.float32)
    mesh = jax.make_mesh((1, devices), ("data", "model"), devices=jax.devices()[:devices])
    path: list[str] = []

    def look(frame: FrameType | None, event: str, _: Any) -> None:
        if frame and event == "call" and frame.f_code is scores.__code__ and not path:
            while frame:
                if frame.f_code.co_filename.startswith(str(ROOT)):
                    path.insert(0, frame.f_code.co_name)
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
    on_mesh = ["run", "run_on_shards", "_inside", "run"] if devices > 1 else []
    assert path == ["dot_product_attention", *on_mesh, "attend", "scores"]


def _entered(call: Any, x: jax.Array) -> list[str]:
    """Return the files, in order, with functions that receive x or a value computed from it."""
    files: list[str] = []
    inside: list[FrameType] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if inside:
            if event == "return" and frame is inside[0]:
                inside.clear()
        elif event == "call" and code.co_filename.startswith(str(ROOT)):
            if code.co_name == "initialize":
                # Flax calls initializers for the shapes of parameters; no input enters them.
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
    """Return True if x is a traced array or holds one."""
    if isinstance(x, dict):
        return any(map(_is_traced, x.values()))
    if isinstance(x, tuple | list):
        return any(map(_is_traced, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type | nn.Module):
        return any(_is_traced(getattr(x, field.name, None)) for field in dataclasses.fields(x))
    return isinstance(x, jax.core.Tracer)


def test_the_arguments_of_a_call_have_four_lists() -> None:
    """Two signatures, the type of the arguments that models pass on, and the value of a call."""
    lists = []
    for path in (ROOT / "linen.py", ROOT / "nnx.py", *(ROOT / "layer").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            named: set[str] = set()
            if isinstance(node, ast.ClassDef):
                named = {ast.unparse(x.target) for x in node.body if isinstance(x, ast.AnnAssign)}
            elif isinstance(node, ast.FunctionDef):
                named = {x.arg for x in (*node.args.args, *node.args.kwonlyargs)}
            if {"bias", "lengths"} <= named:
                lists.append((path.name, node.name))
    lines = [("linen.py", "LayerOptions"), ("linen.py", "__call__"), ("nnx.py", "__call__")]
    assert sorted(lists) == [*lines, ("settings.py", "Call")]


@pytest.mark.parametrize(
    ("kind", "most", "T"), [(None, 9, 29), (AxisType.Auto, 11, 31), (AxisType.Explicit, 11, 37)]
)
def test_few_frames_between_layer_and_score_matmul(
    kind: AxisType | None, most: int, T: int
) -> None:
    """Frames of flax_mha from the layer's call to the matmul q·kᵀ."""
    # No other test has these lengths: JAX would not call functions that it has traced before.
    H, x = 8, jnp.ones((2, T, 32))
    layer = MultiHeadAttention(4, mask=masks.Causal(), kernel="reference")
    with contextlib.ExitStack() as stack:
        if kind is not None:
            stack.enter_context(jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), (kind,) * 2)))
            stack.enter_context(nn.logical_axis_rules(sharding.RULES))
        variables = sharding.init(layer, jax.random.key(0), x[:, :2])
        path, *_ = _products(lambda: jax.eval_shape(layer.apply, variables, x), T, H)
    assert 5 <= len(path) <= most, path


def _products(trace: Callable[[], Any], *sizes: int) -> list[list[str]]:
    """Return the frames of this package at each product of arrays with all these sizes."""
    paths: list[list[str]] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "dot_general":
            shapes = [getattr(frame.f_locals.get(side), "shape", ()) for side in ("lhs", "rhs")]
            if all({*sizes} <= {*shape} for shape in shapes):
                paths.append(_ours(frame)[::-1])

    sys.setprofile(look)
    try:
        trace()
    finally:
        sys.setprofile(None)
    return paths


def _ours(frame: FrameType | None) -> list[str]:
    names = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(ROOT)):
            file = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()
            names.append(f"{file}: {frame.f_code.co_name}")
        frame = frame.f_back
    return names
