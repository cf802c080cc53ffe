"""The splash kernel, compiled for TPUs without one."""

import importlib.util
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha.masks import Causal, Lengths, Predicate, Segments, Window
from flax_mha.scores import SoftCap
from tests.kernels.test_flex_compile import compiled, mesh_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu"),
]
LONG = 32768
# The mask of segment ids, and the heads N and K.
CALLS = {
    "causal, MHA": (lambda ids: Causal(), 2, 2),
    "segments, GQA": (Segments, 4, 2),
    "causal window segments, GQA": (
        lambda ids: Causal() & Window(left=1024) & Segments(ids), 4, 2,
    ),
}  # fmt: skip


@pytest.mark.sampled(0)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("setting", ["tensorfloat32", "highest"])
@pytest.mark.parametrize("kernel", ["flex", "short", "splash"])
def test_kernels_compile_in_every_setting_of_precision(
    compiling_for_tpu, kernel: str, setting: str, dtype: str
) -> None:
    refused = kernel == "splash" and (dtype, setting) != ("float32", "highest")
    expected = pytest.raises(ValueError, match=f"no {dtype} matmuls in the precision {setting}")
    with jax.default_matmul_precision(setting), expected if refused else nullcontext():
        compiled(mesh_of("v5e"), kernel, 256, 64, lambda ids: {"mask": Causal()}, (), dtype)


# Each call for one generation, and for each generation the call that has everything.
@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("generation", "call"),
    [("v5e", call) for call in CALLS]
    + [(generation, "causal window segments, GQA") for generation in ("v5p", "v6e")],
)
def test_long_sequences_compile_without_mask_table(
    compiling_for_tpu, generation: str, call: str
) -> None:
    mask, N, K = CALLS[call]
    text, program = compiled(
        mesh_of(generation), "splash", LONG, 64, lambda ids: {"mask": mask(ids)}, heads=(N, K)
    )
    for phase in ("fwd", "dq", "dkv"):
        assert f"splash_mha_{phase}" in text
    assert f"{LONG},{LONG}" not in text
    # A table would take one byte per pair, row and head. The linear arrays take about 100 MiB,
    # mostly the 128 float32 lanes that splash gives each query's lse.
    assert program.memory_analysis().temp_size_in_bytes < 2 * N * LONG**2 / 8


CASES = {
    "soft cap": {"scores": (SoftCap(30.0),)},
    "predicate": {"mask": Predicate(lambda b, n, i, j: (7 * i + j) % 3 == 0)},
    "positions": {"mask": Causal(), "q_positions": np.arange(1000)[::-1], "kv_positions": 7},
    "lengths": {},
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("case", CASES)
def test_options_compile(compiling_for_tpu, case: str) -> None:
    def call(ids):
        return CASES[case] or {"mask": Lengths(ids[:, 0]) & Causal()}

    compiled(mesh_of("v5e"), "splash", 1000, 64, call)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("generation", "H"), [("v5e", 256), ("v5p", 256), ("v6e", 256), ("v5e", 512)]
)
def test_largest_blocks_fit_in_memory(compiling_for_tpu, generation: str, H: int) -> None:
    def call(ids):
        return {"mask": Causal() & Window(600) & Segments(ids)}

    compiled(mesh_of(generation), "splash", 2048, H, call, (), jnp.float32, (2, 1))


def test_splash_on_mesh_gathers_nothing(compiling_for_tpu) -> None:
    mesh = mesh_of("v5e", 2, 2)
    text, _ = compiled(mesh, "splash", 2048, 64, lambda ids: {"mask": Causal() & Segments(ids)})
    assert "all-gather" not in text
