"""flax_mha's own kernel for Hopper, compiled for an H200 without one.

It needs the wheels of the extra gpu-compile.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.plan import gpus
from flax_mha import dot_product_attention
from flax_mha.kernels.flex import hopper
from flax_mha.masks import Causal, Lengths, PerHead, Predicate, Segments, Window
from flax_mha.scores import Alibi, Score, SoftCap
from tests.kernels.test_flex_hopper import user_score

LACKING = gpus.lacking() or hopper.LACKING
pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.skipif(LACKING is not None, reason=str(LACKING)),
]
T, N, K = 1000, 4, 2
IDS = jnp.zeros((1, T), jnp.int32)
DROPOUT = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}

# Each call as a function of learned arrays, their shapes, the features and the dtype.
CALLS: dict[str, tuple[Any, tuple[tuple[int, ...], ...], int, str]] = {
    "causal": (lambda: {"mask": Causal()}, (), 64, "bfloat16"),
    "largest": (lambda: {"mask": Causal() & Segments(IDS)}, (), 256, "float16"),
    "alibi": (lambda t: {"scores": (Alibi(t),)}, ((N,),), 128, "bfloat16"),
    "bias, sinks, dropout": (
        lambda bias, sinks: {"mask": Lengths(IDS[:, 0]), "bias": bias, "sinks": sinks, **DROPOUT},
        ((T, T), (N,)), 64, "float16",
    ),
    "traced numbers": (lambda table: {"mask": Causal() & table}, ((T, T),), 64, "bfloat16"),
    "functions": (
        lambda w, t: {
            "mask": Predicate(lambda b, n, i, j, m: (i + j + n + b) % m == 0, (IDS[0, 0],))
            | PerHead([Causal(), Window(3, 3), ~Causal(), Segments(IDS)]),
            "scores": (SoftCap(30.0), Alibi(), Score(user_score, (w, t))),
        },
        ((), ()), 64, "bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_flex_compiles_for_hopper(optimized: None, name: str) -> None:
    """Forward and all gradients."""
    call, shapes, features, dtype = CALLS[name]
    mesh = Mesh(np.array(gpus.of("h200", 1)), ("all",))
    whole = NamedSharding(mesh, PartitionSpec())
    q, k = (
        jax.ShapeDtypeStruct((1, T, heads, features), dtype, sharding=whole) for heads in (N, K)
    )
    learned = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole) for shape in shapes]

    def loss(q: Any, k: Any, v: Any, learned: Any) -> Any:
        out = dot_product_attention(q, k, v, kernel="flex", **call(*learned))
        return (out.astype(jnp.float32) ** 2).sum()

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(q, k, k, learned).compile()
    assert program.as_text().count("mosaic_gpu") >= 3
