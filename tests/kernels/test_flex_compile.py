"""flax_mha's own TPU kernels, `flex` and `short`, and `reference`, compiled without a TPU."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.plan.compiled import dumped
from flax_mha import MultiHeadAttention, dot_product_attention, sharding
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
LONG, N = 32768, 4
DROPOUT = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}


def mesh_of(generation: str, *sizes: int) -> Mesh:
    """Return a mesh of one chip, or of these sizes."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    names = ("data", "model")[: len(sizes)] or ("all",)
    devices = np.array(topology.devices[: int(np.prod(sizes, dtype=int))])
    return Mesh(devices.reshape(sizes or (1,)), names, axis_types=(AxisType.Auto,) * len(names))


def compiled(
    mesh: Mesh, kernel: str, length: int, H: int, call: Any, shapes: Sequence[tuple[int, ...]] = (),
    dtype: Any = jnp.bfloat16, heads: tuple[int, int] = (4, 2),
) -> tuple[str, Any]:  # fmt: skip
    """Compile a loss and its gradients, including learned arrays, with rows and heads sharded.

    Returns the text of the program, and the program, whose own text not every jaxlib can read.
    """
    axes = mesh.axis_names if len(mesh.axis_names) == 2 else (None, None)
    layout = NamedSharding(mesh, PartitionSpec(axes[0], None, axes[1]))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*x)) for x in (axes[:1], ()))
    q, k = (jax.ShapeDtypeStruct((2, length, M, H), dtype, sharding=layout) for M in heads)
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=rows)
    learned = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole) for shape in shapes]

    def loss(q, k, v, learned, ids):
        out = dot_product_attention(q, k, v, kernel=kernel, **call(ids, *learned))
        return (out.astype(jnp.float32) ** 2).sum()

    program = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        return dumped(program.lower(q, k, k, learned, ids))


def test_one_query_multiplies_matrices(compiling_for_tpu: None) -> None:
    """By itself, XLA computes sums of products, in several times the cycles."""
    q, k = (jax.ShapeDtypeStruct((8, n, 4, 64), jnp.bfloat16) for n in (1, 256))
    mesh = mesh_of("v5e")
    with jax.set_mesh(mesh):
        whole = NamedSharding(mesh, PartitionSpec())
        program = jax.jit(
            jax.value_and_grad(lambda *qkv: dot_product_attention(*qkv).sum(), (0, 1, 2)),
            in_shardings=(whole,) * 3,
        )
        text, _ = dumped(program.lower(q, k, k))
    assert text.count(" convolution(") == 6


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_long_sequences_compile_without_mask_table(compiling_for_tpu, generation: str) -> None:
    def call(ids):
        return {"mask": Causal() & Segments(ids), "scores": (Alibi(),)}

    text, program = compiled(mesh_of(generation), "flex", LONG, 64, call)
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


# Each call as a function of segment ids and learned arrays, and these arrays' shapes for T tokens.
CALLS: dict[str, tuple[Any, Callable[[int], Sequence[tuple[int, ...]]]]] = {
    "t5": (lambda ids, t: {"mask": Causal(), "scores": (RelativeBias(t),)}, lambda T: [(N, 32)]),
    "bias, sinks, dropout": (
        lambda ids, bias, sinks: {"mask": Causal(), "bias": bias, "sinks": sinks, **DROPOUT},
        lambda T: [(T, T), (N,)],
    ),
    "user_score": (
        lambda ids, w, x: {"scores": (Score(user_score, (w, x)), Alibi(), SoftCap(3.0))},
        lambda T: [(), (N, 5)],
    ),
    "traced masks": (
        lambda ids, rows, keys: {
            "mask": (Prefix(ids[:, 0]) & Lengths(ids, ids[:, 1]))
            | PerHead([Causal(), Window(3, 3), ~Causal(), Segments(ids)])
            | ((ids[:, None, :, None] + ids[:, None, None, :]) % 3 == 0),
            "q_positions": ids, "bias": rows + keys,
        },
        lambda T: [(N, T, 1), (1, 1, T)],
    ),
    "traced numbers": (
        lambda ids: {"mask": Causal() & (ids[:, None, :, None] * ids[:, None, None, :])},
        lambda T: [],
    ),
    "lattice": (
        lambda ids: {"mask": Neighborhood((ids.shape[1] // 20, 20), (5, 8)) & Dilated(3)},
        lambda T: [],
    ),
    "chosen": (
        lambda ids: {
            # A block for each 64 queries.
            "mask": Causal() & BlockSparse(ids[:, None, : -(-ids.shape[1] // 64), None], 64, 64),
        },
        lambda T: [],
    ),
    "predicate": (
        lambda ids: {
            "mask": Predicate(lambda b, n, i, j, m: (i + j + n + b) % m == 0, (ids[0, 0],)),
            "scores": (SoftCap(30.0),), "precision": "highest",
        },
        lambda T: [],
    ),
}  # fmt: skip


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kernel", ["flex", "short"])
@pytest.mark.parametrize("name", CALLS)
def test_options_compile(compiling_for_tpu, name: str, kernel: str) -> None:
    (call, shapes), T = CALLS[name], 1000 if kernel == "flex" else 200
    dtype = jnp.float32 if name in ("predicate", "traced masks") else jnp.bfloat16
    text, _ = compiled(mesh_of("v5e"), kernel, T, 64, call, shapes(T), dtype)
    assert f"{kernel}_forward" in text
    assert f"{kernel}_backward" in text


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "which",
    [
        *(f"{chip} flex 4096 256 float32" for chip in TOPOLOGIES),
        *(f"{chip} flex 4096 512 float32" for chip in ("v4", "v5e")),
        *(f"{chip} short 256 128 float32" for chip in TOPOLOGIES),
        # A v4 has 16 MiB of fast memory, and the kernel refuses the longest there.
        *(f"{chip} short 512 256 bfloat16" for chip in ("v5e", "v5p", "v6e")),
        "v5e short 17 16 bfloat16",
    ],
)  # fmt: skip
def test_largest_blocks_fit_in_memory(compiling_for_tpu, which: str) -> None:
    def call(ids, slopes):
        scores = (SoftCap(3.0), Alibi(slopes))
        return {"mask": Causal() & Segments(ids), "scores": scores, **DROPOUT}

    generation, kernel, T, H, dtype = which.split()
    # On a v6e, blocks of 1,024.
    compiled(mesh_of(generation), kernel, int(T), int(H), call, [(N,)], jnp.dtype(dtype))


@pytest.mark.parametrize("kernel", ["flex", "short"])
def test_vmap_over_last_axes_compiles(compiling_for_tpu: None, kernel: Any) -> None:
    """Mosaic takes no block that leaves out the last axis of an array."""
    mesh = mesh_of("v5e")
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        for shape in ((1, 197, 2, 64, 2), (2, 32, 2), (2, 2))
    ]

    def loss(x: jax.Array, table: jax.Array, sinks: jax.Array) -> jax.Array:
        scores = (RelativeBias(table),)
        out = dot_product_attention(x, x, x, kernel=kernel, scores=scores, sinks=sinks)
        return (out**2).sum()

    program = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes=-1))
    with jax.set_mesh(mesh):
        text, _ = dumped(program.lower(*arrays))
    assert f"{kernel}_forward" in text


def test_one_query_compiles(compiling_for_tpu: None) -> None:
    """Mosaic fails to multiply a vector in bfloat16."""
    text, _ = compiled(mesh_of("v5e"), "short", 1, 64, lambda ids: {})
    assert "short_backward" in text


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "which",
    ["v4 2048 128", "v5e 16384 128", "v5e 8192 64", "v5p 8192 128", "v6e 8192 256", "v6e 4096 128"],
)
def test_kernel_rotates_with_large_tables(compiling_for_tpu, monkeypatch, which: str) -> None:
    generation, T, H = which.split()[0], *map(int, which.split()[1:])
    dtype = jnp.float32 if which == "v6e 4096 128" else jnp.bfloat16
    rotates, queries = [], rotated.queries
    monkeypatch.setattr(
        rotated, "queries", lambda *args: rotates.append(args[1] is not None) or queries(*args)
    )
    layer = MultiHeadAttention(4, head_dim=H, rotary=Rotary(), mask=Causal(), dtype=dtype)
    params = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 4, 64)))
    mesh = mesh_of(generation)
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
    assert rotates == [True] * 3  # Queries forward and backward, and their gradients.


def test_flex_on_mesh_gathers_nothing(compiling_for_tpu) -> None:
    def call(ids, slopes):
        return {"mask": Causal() & Segments(ids), "scores": (Alibi(slopes),), **DROPOUT}

    text, _ = compiled(mesh_of("v5e", 2, 2), "auto", 2048, 64, call, [(N,)])
    assert "flex_forward" in text
    assert "all-gather" not in text
