"""The kernel for short sequences, compiled for TPUs without one."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.plan.compiled import dumped
from flax_mha import dot_product_attention
from flax_mha.masks import Causal, Lengths, PerHead, Predicate, Segments, Window
from flax_mha.scores import Alibi, RelativeBias, Score, SoftCap
from tests.kernels.test_flex_compile import DROPOUT, TOPOLOGIES, user_score

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu"),
]
N, K = 4, 2
# Each call as a function of segment ids and learned arrays, and the arrays' shapes.
CALLS = {
    "plain": (lambda ids: {}, ()),
    "t5": (lambda ids, t: {"mask": Causal(), "scores": (RelativeBias(t),)}, ((N, 32),)),
    "bias, sinks, dropout": (
        lambda ids, bias, sinks: {"mask": Causal(), "bias": bias, "sinks": sinks, **DROPOUT},
        ((N, 197, 197), (N,)),
    ),
    "user_score": (
        lambda ids, w, x: {"scores": (Score(user_score, (w, x)), Alibi(), SoftCap(3.0))},
        ((), (N, 5)),
    ),
    "columns and rows": (
        lambda ids, rows, keys: {
            "mask": Segments(ids) & Lengths(ids[:, 0]) | PerHead([Causal(), Window(3, 3)] * 2),
            "bias": rows + keys, "q_positions": ids,
        },
        ((N, 197, 1), (1, 1, 197)),
    ),
    "traced numbers": (
        lambda ids: {"mask": Causal() & (ids[:, None, :, None] * ids[:, None, None, :])}, ()
    ),
    "predicate": (
        lambda ids: {
            "mask": Predicate(lambda b, n, i, j, m: (i + j + n + b) % m == 0, (ids[0, 0],)),
            "precision": "highest",
        },
        (),
    ),
}  # fmt: skip


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch, optimized: None) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def chip(generation: str) -> tuple[Mesh, NamedSharding]:
    """Return a mesh of one chip, and the sharding of arrays on it."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    mesh = Mesh(topology.devices[:1], ("all",))
    return mesh, NamedSharding(mesh, PartitionSpec())


def compiled(generation, length, H, call, shapes, dtype=jnp.bfloat16):
    """Compile the loss and its gradients, of learned arrays too, and look for the kernels."""
    mesh, one = chip(generation)
    q, k = (jax.ShapeDtypeStruct((2, length, M, H), dtype, sharding=one) for M in (N, K))
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=one)
    learned = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=one) for shape in shapes]

    def loss(q, k, v, learned, ids):
        out = dot_product_attention(q, k, v, kernel="short", **call(ids, *learned))
        return (out.astype(jnp.float32) ** 2).sum()

    program = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    with jax.set_mesh(mesh):
        text, _ = dumped(program.lower(q, k, k, learned, ids))
    assert "short_forward" in text
    assert "short_backward" in text


@pytest.mark.parametrize("name", CALLS)
def test_options_compile(tpu, name: str) -> None:
    dtype = jnp.float32 if name in ("predicate", "columns and rows") else jnp.bfloat16
    compiled("v5e", 197, 64, *CALLS[name], dtype)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("generation", "which"),
    [
        (generation, which)
        for generation in TOPOLOGIES
        for which in ("17 16 bfloat16", "256 128 float32", "512 256 bfloat16")
        # A v4 has 16 MiB of fast memory, and the kernel refuses the longest there.
        if (generation, which) != ("v4", "512 256 bfloat16")
    ],
)
def test_sizes_compile(tpu, generation: str, which: str) -> None:
    length, H, dtype = which.split()
    compiled(generation, int(length), int(H), *CALLS["user_score"], jnp.dtype(dtype))


@pytest.mark.parametrize("kernel", ["flex", "short"])
def test_vmap_over_last_axes_compiles(tpu: None, kernel: Any) -> None:
    """Mosaic takes no block that leaves out the last axis of an array."""
    shapes = (1, 197, K, 64, 2), (K, 32, 2), (K, 2)
    mesh, one = chip("v5e")
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=one) for shape in shapes]

    def loss(x: jax.Array, table: jax.Array, sinks: jax.Array) -> jax.Array:
        scores = (RelativeBias(table),)
        out = dot_product_attention(x, x, x, kernel=kernel, scores=scores, sinks=sinks)
        return (out**2).sum()

    program = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes=-1))
    with jax.set_mesh(mesh):
        text, _ = dumped(program.lower(*arrays))
    assert f"{kernel}_forward" in text


def test_one_query_compiles(tpu: None) -> None:
    """Mosaic fails to multiply a vector in bfloat16."""
    mesh, one = chip("v5e")
    shapes = (2, 1, N, 64), (2, 40, K, 64)
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=one) for shape in shapes)

    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, k, kernel="short").sum(dtype=jnp.float32)

    with jax.set_mesh(mesh):
        text, _ = dumped(jax.jit(jax.grad(loss, (0, 1))).lower(q, k))
    assert "short_backward" in text
