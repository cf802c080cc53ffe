"""flax_mha's own TPU kernel, compiled for TPUs without one."""

import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.plan.compiled import dumped
from flax_mha import MultiHeadAttention, dot_product_attention, explain, sharding
from flax_mha.kernels.flex.tpu import rotated
from flax_mha.masks import (
    BlockSparse,
    Causal,
    Dilated,
    Lengths,
    Neighborhood,
    PerHead,
    Predicate,
    Prefix,
    Segments,
    Window,
)
from flax_mha.positions import Rotary
from flax_mha.scores import Alibi, RelativeBias, Score, SoftCap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu"),
]
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LONG, N, K = 32768, 4, 2
DROPOUT = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch, optimized: None) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def compiled(
    generation,
    length,
    H,
    call,
    shapes=(),
    dtype=jnp.bfloat16,
    spec=None,
    sizes=(),
    kernel="flex",
):
    """Compile the loss and its gradients, of learned arrays too, for one device or a mesh.

    Returns the text of the program, and the program, whose own text not every jaxlib can read.
    """
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    names = ("data", "model")[: len(sizes)] or ("all",)
    devices = np.array(topology.devices[: int(np.prod(sizes, dtype=int))])
    mesh = Mesh(devices.reshape(sizes or (1,)), names, axis_types=(AxisType.Auto,) * len(names))
    layout = NamedSharding(mesh, spec or PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(*layout.spec[:1]))
    whole = NamedSharding(mesh, PartitionSpec())
    q, k = (jax.ShapeDtypeStruct((2, length, M, H), dtype, sharding=layout) for M in (N, K))
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=rows)
    learned = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole) for shape in shapes]

    def loss(q, k, v, learned, ids):
        given = call(ids, *learned)
        assert explain(q, k, v, kernel=kernel, **given).chosen == "flex"
        out = dot_product_attention(q, k, v, kernel=kernel, **given)
        return (out.astype(jnp.float32) ** 2).sum()

    program = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    if not sizes:
        return dumped(program.lower(q, k, k, learned, ids))
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        return dumped(program.lower(q, k, k, learned, ids))


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_long_sequences_compile_without_mask_table(tpu, generation: str) -> None:
    def call(ids):
        return {"mask": Causal() & Segments(ids), "scores": (Alibi(),)}

    text, program = compiled(generation, LONG, 64, call)
    for kernel in ("flex_forward", "flex_backward"):
        assert kernel in text
    # The gradient of the slopes is unused.
    assert "flex_dleaves" not in text
    assert f"{LONG},{LONG}" not in text
    # A table would take one byte per pair, row and head.
    assert program.memory_analysis().temp_size_in_bytes < 2 * N * LONG**2 / 16


def user_score(s, row, head, i, j, w, x):
    near = jnp.clip(j - i, -2, 2) + 2
    s = s * (1 + w * jnp.tanh((i - j + head + row).astype(s.dtype))) + x[head, 0]
    return s + x[head, near] + jnp.asarray(np.arange(5.0, dtype=np.float32))[near]


# Each call as a function of segment ids and learned arrays, and the arrays' shapes.
CALLS = {
    "t5": (lambda ids, t: {"mask": Causal(), "scores": (RelativeBias(t),)}, ((N, 32),)),
    "bias, sinks, dropout": (
        lambda ids, bias, sinks: {"mask": Causal(), "bias": bias, "sinks": sinks, **DROPOUT},
        ((1000, 1000), (N,)),
    ),
    "user_score": (lambda ids, w, x: {"scores": (Score(user_score, (w, x)),)}, ((), (N, 5))),
    "traced masks": (
        lambda ids, b: {
            "mask": (Prefix(ids[:, 0]) & Lengths(ids, ids[:, 1]))
            | PerHead([Causal(), Window(3, 3), ~Causal(), Segments(ids)])
            | ((ids[:, None, :, None] + ids[:, None, None, :]) % 3 == 0),
            "q_positions": ids, "bias": b,
        },
        ((2, 1, 1000, 1),),
    ),
    "traced numbers": (
        lambda ids: {"mask": Causal() & (ids[:, None, :, None] * ids[:, None, None, :])}, ()
    ),
    "lattice": (
        lambda ids, b: {"mask": Neighborhood((20, 50), (5, 8)) & Dilated(3), "bias": b},
        ((N, 1, 1000),),
    ),
    "chosen": (
        lambda ids, b: {
            "mask": Causal() & BlockSparse(ids[:, None, :64].reshape(2, 1, 16, 4), 64, 64),
            "bias": b,
        },
        ((N, 1, 1000),),
    ),
    "predicate": (
        lambda ids, b: {
            "mask": Predicate(lambda b, n, i, j, m: (i + j + n + b) % m == 0, (ids[0, 0],)),
            "bias": b, "scores": (SoftCap(30.0),), "precision": "highest",
        },
        ((N, 1, 1000),),
    ),
}  # fmt: skip


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize("name", CALLS)
def test_options_compile(tpu, name: str) -> None:
    dtype = jnp.float32 if name == "predicate" else jnp.bfloat16
    compiled("v5e", 1000, 64, *CALLS[name], dtype)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("which", ["v4 256", "v4 512", "v5e 256", "v5p 256", "v6e 256", "v5e 512"])
def test_largest_blocks_fit_in_memory(tpu, which: str) -> None:
    def call(ids, slopes):
        scores = (SoftCap(3.0), Alibi(slopes))
        return {"mask": Causal() & Segments(ids), "scores": scores, **DROPOUT}

    generation, H = which.split()
    # On a v6e, blocks of 1,024.
    compiled(generation, 4096, int(H), call, ((N,),), jnp.float32)


@pytest.mark.sampled(0, slow=0.4)
@pytest.mark.parametrize(
    "which",
    ["v4 1024 128", "v5e 8192 128", "v5e 4096 64", "v5p 4096 128", "v6e 4096 256", "v6e 2048 128"],
)
def test_kernel_rotates_with_large_tables(tpu, monkeypatch, which: str) -> None:
    generation, T, H = which.split()[0], *map(int, which.split()[1:])
    dtype = jnp.float32 if which == "v6e 2048 128" else jnp.bfloat16
    rotates, queries = [], rotated.queries
    monkeypatch.setattr(
        rotated, "queries", lambda *args: rotates.append(args[1] is not None) or queries(*args)
    )
    layer = MultiHeadAttention(4, head_dim=H, rotary=Rotary(), mask=Causal(), dtype=dtype)
    params = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 4, 64)))
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    mesh = Mesh(np.array(topology.devices[:1]), ("all",), axis_types=(AxisType.Auto,))
    x, params = jax.tree.map(
        lambda y: jax.ShapeDtypeStruct(
            y.shape, y.dtype, sharding=NamedSharding(mesh, PartitionSpec())
        ),
        (jax.ShapeDtypeStruct((1, T, 64), dtype), params),
    )

    def loss(params, x):
        return (layer.apply(params, x).astype(jnp.float32) ** 2).sum()

    with jax.set_mesh(mesh):
        text, _ = dumped(jax.jit(jax.grad(loss, (0, 1))).lower(params, x))
    assert "flex_backward" in text
    assert rotates == [True, True]


def test_flex_on_mesh_gathers_nothing(tpu) -> None:
    def call(ids, slopes):
        return {"mask": Causal() & Segments(ids), "scores": (Alibi(slopes),), **DROPOUT}

    spec = PartitionSpec("data", None, "model")
    text, _ = compiled("v5e", 2048, 64, call, ((N,),), spec=spec, sizes=(2, 2), kernel="auto")
    assert "all-gather" not in text
