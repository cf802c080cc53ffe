"""Layers and models converted to ONNX by jax2onnx, and the primitives that converters meet."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import DecoderBlock, LanguageModel, MultiHeadAttention, masks
from flax_mha.models import Decoder, TokenEmbedding
from flax_mha.positions import Rotary
from tests.support.arrays import random_variables

# JAX's own, which converters know from other layers. Those of the last line compute nothing.
PRIMITIVES = (
    "abs add and broadcast_in_dim concatenate convert_element_type cos div dot_general exp gather "
    "ge integer_pow iota le lt max mul pow reduce_max reduce_or reduce_sum reshape rsqrt select_n "
    "shift_right_logical sign sin slice split square squeeze sub tanh transpose "
    "custom_jvp_call jit name optimization_barrier stop_gradient"
)
D, VOCABULARY = 8, 11
LAYER = MultiHeadAttention(4, mask=masks.Causal(), kernel="reference")
TURNED = LAYER.clone(num_kv_heads=2, rotary=Rotary())
# A module, and the names of further arguments of its call.
CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "causal": (LAYER, ()),
    "lengths": (LAYER, ("lengths",)),
    "mask": (LAYER.clone(mask=None), ("mask",)),
    "grouped": (LAYER.clone(num_kv_heads=2), ()),
    "rotary": (LAYER.clone(rotary=Rotary()), ("positions",)),
    "window and sinks": (LAYER.clone(mask=masks.Window(2, 1), sinks=True), ()),
    "model": (
        LanguageModel(TokenEmbedding(VOCABULARY, D), Decoder(2, DecoderBlock(TURNED, 16))),
        ("lengths",),
    ),
}
AXES: dict[str, tuple[Any, ...]] = {
    "x": ("B", "T", D), "tokens": ("B", "T"), "lengths": ("B",), "positions": ("B", "T"),
    "mask": ("B", 1, "T", "T"),
}  # fmt: skip


def case(name: str, B: int, T: int) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a function of arrays, and its arguments by name."""
    module, more = CASES[name]
    rng = np.random.default_rng(T)
    arrays: dict[str, np.ndarray] = {
        "x": rng.normal(size=(B, T, D)).astype(np.float32),
        "tokens": rng.integers(0, VOCABULARY, (B, T), np.int32),
        "lengths": np.arange(B, dtype=np.int32),  # The first row is empty.
        "positions": rng.integers(0, 50, (B, T), np.int32),
        "mask": rng.random((B, 1, T, T)) < 0.5,
    }
    names = ("tokens" if name == "model" else "x", *more)
    x = jax.ShapeDtypeStruct(arrays[names[0]].shape, arrays[names[0]].dtype)
    variables = random_variables(module, x)

    def call(x: Any, *args: Any) -> Any:
        return module.apply(variables, x, **dict(zip(more, args, strict=True)))

    return call, {name: arrays[name] for name in names}


def primitives(jaxpr: Any) -> set[str]:
    """Return the names of the primitives of a traced program, inner ones included."""
    names = set()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        names.add(eqn.primitive.name)
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            names |= primitives(inner) if hasattr(inner, "eqns") else set()
    return names


@pytest.mark.parametrize("name", CASES)
def test_programs_have_no_other_primitives(name: str) -> None:
    call, arrays = case(name, 2, 5)
    found = primitives(jax.make_jaxpr(call)(*arrays.values()))
    assert not found - {*PRIMITIVES.split()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_onnx_matches(name: str, tmp_path: Path) -> None:
    """Batch and length are symbolic. docs/interop.md says why jit is disabled."""
    jax2onnx = pytest.importorskip("jax2onnx", reason="needs the extra onnx")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    call, arrays = case(name, 2, 5)
    specs = [jax.ShapeDtypeStruct(AXES[name], x.dtype) for name, x in arrays.items()]
    path = str(tmp_path / "program.onnx")
    with jax.disable_jit(), jax.numpy_rank_promotion("allow"):
        jax2onnx.to_onnx(call, specs, return_mode="file", output_path=path)
    session = onnxruntime.InferenceSession(path)
    names = [x.name for x in session.get_inputs()]
    for B, T in ((2, 5), (3, 9), (1, 1)):
        call, arrays = case(name, B, T)
        (out,) = session.run(None, dict(zip(names, arrays.values(), strict=True)))
        np.testing.assert_allclose(out, jax.jit(call)(*arrays.values()), rtol=1e-5, atol=1e-5)
