"""A call is decided once, and lowered once."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import KVCache, explain
from flax_mha.kernels import Platform, choose
from flax_mha.kernels.call.bind import bind_call
from flax_mha.masks import Causal, Lengths, Mask, Window
from tests.kernels.test_flex_hopper import H200, needs_mosaic
from tests.support.meshes import KINDS
from tests.support.platforms import pretend


@pytest.mark.parametrize(
    ("rows", "queries", "kv_heads", "dtype", "first"),
    [
        (8, 64, 16, jnp.bfloat16, "cudnn"),
        (8, 2, 4, jnp.bfloat16, "cudnn"),
        (8, 4, 16, jnp.bfloat16, "decode"),
        (8, 1, 2, jnp.bfloat16, "decode"),
        (2, 64, 4, jnp.bfloat16, "decode"),
        (8, 64, 16, jnp.int8, "decode"),
    ],
)
def test_gpus_read_a_cache_by_cudnn_where_scores_are_many(
    rows: int, queries: int, kv_heads: int, dtype: Any, first: str
) -> None:
    q = jax.ShapeDtypeStruct((rows, queries, 16, 128), jnp.bfloat16)
    x = jnp.zeros((rows, 1, kv_heads, 128), jnp.bfloat16)
    key = jax.eval_shape(
        lambda: KVCache.empty((rows,), 4096, kv_heads, 128, dtype=dtype).extended(x, x, None)[0].key
    )
    assert choose.preference(q, key, Platform("gpu", "NVIDIA H200"))[0] == first
    assert choose.preference(q, key, Platform("tpu"))[0] == "decode"


@pytest.mark.parametrize(
    ("length", "traced", "chosen"),
    [
        (256, False, "reference"),
        (257, False, "blockwise"),
        (256, True, "reference"),
        (257, True, "blockwise"),
    ],
)
def test_short_calls_on_cpu_take_reference_kernel(length: int, traced: bool, chosen: str) -> None:
    x = jax.ShapeDtypeStruct((2, length, 2, 8), jnp.float32)
    found: list[str | None] = []

    def call(x: jax.Array, keys: jax.Array) -> jax.Array:
        mask = Lengths(keys) if traced else Causal()
        explanation, _ = choose.decide("auto", *bind_call(x, x, x, mask=mask))
        found.append(explanation.chosen)
        return x

    jax.eval_shape(call, x, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert found == [chosen]


@pytest.mark.parametrize(
    ("queries", "keys", "first"),
    [
        (31, 31, "reference"),
        (32, 32, "short"),
        (8, 512, "reference"),
        (512, 31, "reference"),
        (512, 512, "short"),
        (31, 1024, "reference"),
        (1024, 64, "reference"),
        (64, 1024, "flex"),
    ],
)
def test_short_and_flex_come_first_on_tpus_from_32_queries_and_keys_on(
    queries: int, keys: int, first: str
) -> None:
    q, k = (jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16) for length in (queries, keys))
    assert explain(q, k, k, platform=Platform("tpu", "TPU v5 lite")).chosen == first


@pytest.mark.parametrize(
    ("platform", "chosen"),
    [
        (Platform("cpu"), "blockwise"),
        (Platform("tpu"), "flex"),
        (H200, "cudnn"),
        (Platform("gpu", "NVIDIA V100-SXM2-16GB", cudnn=(9, 20, 0)), "blockwise"),
        (Platform("gpu", "NVIDIA A100-SXM4-80GB", cudnn=(9, 1, 0)), "blockwise"),
        pytest.param(Platform("gpu", "NVIDIA H200", cudnn=(9, 1, 0)), "flex", marks=needs_mosaic),
    ],
)
def test_explain_for_another_platform(platform: Platform, chosen: str) -> None:
    x = jax.ShapeDtypeStruct((2, 4096, 4, 64), jnp.bfloat16)
    assert explain(x, x, x, platform=platform).chosen == chosen


@pytest.mark.parametrize(
    ("rows", "heads", "queries", "keys", "chosen"),
    [
        (1, 1, 2048, 2048, "reference"),
        (1, 1, 2048, 2049, "blockwise"),
        (1, 1, 1024, 4096, "reference"),
        # 2²⁸ scores over all rows and heads: 1 GiB.
        (4, 16, 2048, 2048, "reference"),
        (5, 16, 2048, 2048, "blockwise"),
        (1024, 16, 128, 128, "reference"),
        (1025, 16, 128, 128, "blockwise"),
    ],
)
def test_float32_on_a_gpu_is_bounded_in_memory(
    rows: int, heads: int, queries: int, keys: int, chosen: str
) -> None:
    q = jax.ShapeDtypeStruct((rows, queries, heads, 64), jnp.float32)
    k = jax.ShapeDtypeStruct((rows, keys, 1, 64), jnp.float32)
    assert explain(q, k, k, platform=H200).chosen == chosen
    # Rows may have several axes; the bound does not apply to cuDNN.
    q, k = (jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in (q, k))
    assert explain(q, k, k, platform=H200).chosen == chosen
    q, k = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (q, k))
    assert explain(q, k, k, platform=H200).chosen == "cudnn"


@pytest.mark.parametrize(
    ("platform", "mask", "chosen"),
    [
        (H200, Causal(), "cudnn"),
        (H200, None, "cudnn"),
        (H200, Causal() & Window(70), "cudnn"),
        (Platform("gpu", "NVIDIA A100-SXM4-80GB", cudnn=(9, 1, 0)), Causal(), "reference"),
        (Platform("tpu"), Causal(), "flex"),
        (Platform("cpu"), Causal(), "blockwise"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_explain_of_ring_for_another_platform(
    kind: str, platform: Platform, mask: Mask | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the named platform counts, not the current one."""
    mesh = jax.make_mesh((4,), ("context",), (KINDS[kind],), devices=jax.devices()[:4])
    at = NamedSharding(mesh, P(None, "context"))
    x = jax.ShapeDtypeStruct((2, 2048, 3, 64), jnp.bfloat16, sharding=at)
    for at_hand in ("cpu", "gpu"):
        pretend(monkeypatch, at_hand)
        with jax.set_mesh(mesh), nn.logical_axis_rules([("length", "context")]):
            found = explain(x, x, x, mask=mask, platform=platform)
        assert (found.strategy, found.chosen) == ("ring", chosen), at_hand


@pytest.mark.parametrize(
    ("mask", "share", "no_key", "last"),
    [
        (Causal(), 0.625, 0, "62.5% of pairs may attend, and every query has a key"),
        (Causal() & Lengths(np.array([0, 4])), 0.3125, 4, "and 4 queries have no key"),
        (np.zeros((4, 4), bool), 0, 4, "no query has a key, so all outputs are 0"),
        (jnp.ones((4, 4), bool), 1, 0, "everything may attend, so the mask changes nothing"),
        (None, None, None, "decode"),
    ],
)
def test_explanation_counts_what_may_attend(
    mask: Any, share: float | None, no_key: int | None, last: str
) -> None:
    x = jax.ShapeDtypeStruct((2, 4, 2, 8), jnp.float32)
    told = explain(x, x, x, mask=mask)
    assert (told.share, told.no_key) == (share, no_key)
    assert last in str(told).splitlines()[-1]


def test_explanation_counts_no_traced_or_huge_mask() -> None:
    x = jax.ShapeDtypeStruct((2, 4, 2, 8), jnp.float32)
    found = []

    def traced(mask: jax.Array) -> None:
        found.append(explain(x, x, x, mask=mask).share)
        found.append(explain(x, x, x, mask=Causal(), q_positions=mask[0] * 1).share)
        found.append(explain(x, x, x, mask=Causal(), q_positions=3).share)

    jax.eval_shape(traced, jax.ShapeDtypeStruct((4, 4), jnp.int32))
    x = jax.ShapeDtypeStruct((1, 2**14, 2, 8), jnp.float32)
    found.append(explain(x, x, x, mask=Causal()).share)
    assert found == [None, None, 1.0, None]
