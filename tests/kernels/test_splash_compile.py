"""The splash kernel, compiled for TPUs without one."""

import importlib.util
from contextlib import nullcontext

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_mha import dot_product_attention, explain, sharding
from flax_mha.masks import Causal, Lengths, Predicate, Segments, Window
from flax_mha.scores import SoftCap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu"),
]
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LONG = 32768
# The static mask, True to combine it with Segments, and the heads N and K.
CALLS = {
    "causal, MHA": (Causal(), False, 2, 2),
    "segments, GQA": (None, True, 4, 2),
    "causal window segments, GQA": (Causal() & Window(left=1024), True, 4, 2),
}


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch, optimized: None) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def compiled(generation, length, N, K, H, attend, dtype=jnp.bfloat16, spec=None, shape=()):
    """Compile the loss of attend(q, k, v, ids) and its gradients, for one device or a mesh."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    names = ("data", "model")[: len(shape)] or ("all",)
    devices = np.array(topology.devices[: int(np.prod(shape, dtype=int))]).reshape(shape or (1,))
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    layout = NamedSharding(mesh, spec or PartitionSpec())
    rows = PartitionSpec(*layout.spec[:1])
    q, k = (jax.ShapeDtypeStruct((2, length, M, H), dtype, sharding=layout) for M in (N, K))
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=NamedSharding(mesh, rows))

    def loss(q, k, v, ids):
        return attend(q, k, v, ids).astype(jnp.float32).sum()

    program = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    if not shape:
        return program.lower(q, k, k, ids).compile()
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        return program.lower(q, k, k, ids).compile()


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("setting", ["tensorfloat32", "highest"])
@pytest.mark.parametrize("kernel", ["flex", "short", "splash"])
def test_kernels_compile_in_every_setting_of_precision(
    tpu, kernel: str, setting: str, dtype: str
) -> None:
    def attend(q, k, v, ids):
        return dot_product_attention(q, k, v, mask=Causal(), kernel=kernel)

    refused = kernel == "splash" and (dtype, setting) != ("float32", "highest")
    expected = pytest.raises(ValueError, match=f"no {dtype} matmuls in the precision {setting}")
    with jax.default_matmul_precision(setting), expected if refused else nullcontext():
        compiled("v5e", 256, 2, 2, 64, attend, jnp.dtype(dtype))


# Each call for one generation, and for each generation the call that has everything.
@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize(
    ("generation", "call"),
    [("v5e", call) for call in CALLS]
    + [(generation, "causal window segments, GQA") for generation in ("v5p", "v6e")],
)
def test_long_sequences_compile_without_mask_table(tpu, generation: str, call: str) -> None:
    known, segments, N, K = CALLS[call]

    def attend(q, k, v, ids):
        mask = known
        if segments:
            mask = Segments(ids) if mask is None else mask & Segments(ids)
        return dot_product_attention(q, k, v, mask=mask, kernel="splash")

    program = compiled(generation, LONG, N, K, 64, attend)
    text = program.as_text()
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


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize("case", CASES)
def test_options_compile(tpu, case: str) -> None:
    def attend(q, k, v, ids):
        call = {"mask": Lengths(ids[:, 0]) & Causal()}
        return dot_product_attention(q, k, v, kernel="splash", **(CASES[case] or call))

    compiled("v5e", 1000, 4, 2, 64, attend)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("generation", "H"), [("v5e", 256), ("v5p", 256), ("v6e", 256), ("v5e", 512)]
)
def test_largest_blocks_fit_in_memory(tpu, generation: str, H: int) -> None:
    def attend(q, k, v, ids):
        mask = Causal() & Window(600) & Segments(ids)
        return dot_product_attention(q, k, v, mask=mask, kernel="splash")

    compiled(generation, 2048, 2, 1, H, attend, jnp.float32)


def test_splash_on_mesh_gathers_nothing(tpu) -> None:
    def attend(q, k, v, ids):
        mask = Causal() & Segments(ids)
        assert explain(q, k, v, mask=mask, kernel="splash").chosen == "splash"
        return dot_product_attention(q, k, v, mask=mask, kernel="splash")

    spec = PartitionSpec("data", None, "model")
    program = compiled("v5e", 2048, 4, 2, 64, attend, spec=spec, shape=(2, 2))
    assert "all-gather" not in program.as_text()
