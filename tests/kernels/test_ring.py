"""Kernels on a ring: the inputs of each hop, and its computation."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention, sharding
from flax_mha.masks import Causal, Lengths, Segments
from flax_mha.scores import Score
from tests.support import oracle
from tests.support.meshes import on

RULES = (("length", "model"), ("heads", None), ("kv_heads", None), ("batch", None))
# The module and name of each kernel's forward function.
FORWARD = {
    "flex": ("flex.passes", "_attend"),
    "blockwise": ("xla.blockwise", "_loops"),
    "cudnn": ("cudnn.primitives", "forward"),
}
BACKWARD = ("cudnn.primitives", "backward")
POSITIONS = ("q_positions", "kv_positions")


def passes(
    of: Sequence[tuple[str, str]], kernel: str, n: int, monkeypatch: pytest.MonkeyPatch,
    traced: Any = None,
) -> list[int]:  # fmt: skip
    """Count how often n devices run each function, for out (or all results) and its gradients.

    `traced` are arguments with traced arrays (default: a causal mask).
    """
    runs = [0] * len(of)
    places = [(importlib.import_module(f"flax_mha.kernels.{place}"), name) for place, name in of]

    def counting(i: int, computed: Any) -> Any:
        def add() -> None:
            runs[i] += 1

        def counted(*args: Any) -> Any:
            jax.debug.callback(add)
            return computed(*args)

        return counted

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def pull(q: jax.Array, k: jax.Array, v: jax.Array, traced: Any) -> jax.Array:
        found = dot_product_attention(q, k, v, kernel=f"ring:{kernel}", **traced)
        return sum(jnp.sum(jnp.sin(x), dtype=jnp.float32) for x in jax.tree.leaves(found))

    with on("Auto", RULES, (1, n)), monkeypatch.context() as patch:
        for i, (module, name) in enumerate(places):
            patch.setattr(module, name, counting(i, getattr(module, name)))
        dtype = jnp.bfloat16 if kernel == "cudnn" else jnp.float32
        qkv = [jnp.ones((1, 16 * n, 1, 8), dtype)] * 3
        jax.block_until_ready(pull(*qkv, traced or {"mask": Causal()}))
        jax.effects_barrier()
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "n"), [("flex", 2), ("blockwise", 8), ("cudnn", 4)])
def test_ring_backward_runs_no_second_forward(
    kernel: str, n: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """With a causal mask each device attends once to its own block and each earlier one."""
    request.getfixturevalue("nvidia" if kernel == "cudnn" else "tpu")
    blocks = n * (n + 1) // 2
    assert passes([FORWARD[kernel]], kernel, n, monkeypatch) == [blocks]


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize(
    ("call", "blocks"),
    [
        # Two documents of two devices each.
        pytest.param({"mask": Causal() & Segments(jnp.arange(64) // 32)}, 2 * 3, id="documents"),
        # Device i has documents i and 7 − i: only the tiles of a block are empty, not the block.
        pytest.param(
            {"mask": Segments(jnp.asarray(sharding.zigzag(64, 4) // 8))}, 4, id="pieces"
        ),
        pytest.param(
            {"mask": Lengths(jnp.array([40]))}, 4 * 3, id="lengths", marks=pytest.mark.slow
        ),
        # Reversed: each device attends to its own block and each later one.
        pytest.param(
            {"mask": Causal()} | dict.fromkeys(POSITIONS, jnp.arange(64)[::-1]), 10,
            id="positions", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_devices_skip_empty_steps_of_traced_masks(
    call: dict[str, Any], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [FORWARD["blockwise"], ("xla.softmax", "gradient_inputs")]
    assert passes(both, "blockwise", 4, monkeypatch, call) == [blocks] * 2


def test_ring_leaves_no_auto_axes() -> None:
    """Even if no rule names "data". Mosaic refuses to run with such an axis."""
    left = []

    def score(s: jax.Array, *at: Any) -> jax.Array:
        left.append(jax.sharding.get_abstract_mesh().auto_axes)
        return s

    x = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32)
    with on("Auto", RULES, (1, 8)):
        jax.eval_shape(
            lambda q: dot_product_attention(q, q, q, scores=(Score(score),), kernel="ring"), x
        )
    assert left[-1] == ()


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize(
    ("strategy", "dtype"),
    # (XLA:CPU sums bfloat16 in float32 on its own.)
    [("ring", "bfloat16"), ("all_gather", "float16")],
)
def test_gradients_are_summed_in_float32(strategy: str, dtype: str) -> None:
    """In half precision each block's gradient is rounded, but not the sum on each device."""
    rng = np.random.default_rng(6)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(1, 64, 2, 32)), dtype) for _ in range(4))
    exact = oracle.attention_gradients(q, k, v, cotangent=dout)

    def errors(kernel: str) -> list[float]:
        @jax.jit
        def pull(*qkv: jax.Array) -> Any:
            return jax.vjp(lambda *x: dot_product_attention(*x, kernel=kernel), *qkv)[1](dout)

        pairs = zip(pull(q, k, v), (exact.q, exact.k, exact.v), strict=True)
        return [oracle.error(*pair) for pair in pairs]

    alone = errors("blockwise")
    with on("Auto", RULES, (1, 8)):
        over = errors(f"{strategy}:blockwise")
    assert max(a / b for a, b in zip(over, alone, strict=True)) < 1.5, (over, alone)
