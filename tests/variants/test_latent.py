"""Latent attention against its formula, and decoding from latents alone."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import CacheConfig, masks
from flax_mha.positions import Rotary
from flax_mha.variants import MultiHeadLatentAttention
from tests.support import oracle
from tests.support.decoding import decoded
from tests.support.layer_checks import drawn
from tests.support.oracle import error, float64

N, H, R, HV, RANK, D, T = 4, 6, 4, 5, 7, 16, 11
KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)


def layer(**fields: Any) -> MultiHeadLatentAttention:
    defaults: dict[str, Any] = {
        "head_dim": H, "v_head_dim": HV, "kv_rank": RANK, "rope_dim": R, "q_rank": 9,
        "rotary": Rotary(100.0, interleaved=True), "mask": masks.Causal(),
    }  # fmt: skip
    return MultiHeadLatentAttention(N, **defaults | fields)


def expected(params: Any, x: Any) -> np.ndarray:
    """Compute the equations of DeepSeek-V2, 2.1, one after another."""
    x, p = float64(x), float64(params)
    of_q = x
    if "query_down" in p:
        of_q = oracle.rms_norm(p["query_norm"], oracle.project(p["query_down"], x), 1e-6)
    q = oracle.project(p["query"], of_q)
    down = oracle.project(p["kv_down"], x)
    c = oracle.rms_norm(p["kv_norm"], down[..., :RANK], 1e-6)
    k, v = (oracle.project(p[name], c) for name in ("key", "value"))
    turn = lambda x: oracle.rotary(x, np.arange(T), base=100.0, interleaved=True)  # noqa: E731
    r = np.broadcast_to(turn(down[..., None, RANK:]), (*k.shape[:-1], R))
    q = np.concatenate([q[..., :H], turn(q[..., H:])], -1)
    k = np.concatenate([k, r], -1)
    out = oracle.attention(q, k, v, allowed=np.tri(T, dtype=bool))[0]
    return oracle.project(p["out"], out, contracted=2)


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("q_rank", [9, None])
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_latent_attention_matches_formula(q_rank: int | None, kernel: str) -> None:
    module = layer(q_rank=q_rank, kernel=kernel)
    params = drawn(module, X)
    out = jax.jit(module.apply)(params, X)
    assert error(out, expected(params["params"], X)) < 2e-6


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
def test_options_and_cache_dtypes(cache: str) -> None:
    """Lengths, a window, sinks, head_mask and weights, within the rounding of the cache."""
    module = layer(mask=masks.Window(4, 0), sinks=True)
    params = drawn(module, X)
    lengths, head_mask = np.array([T, 6]), np.array([1.0, 0.0, 0.5, 2.0], np.float32)
    call = {"lengths": lengths, "head_mask": head_mask}
    apply = jax.jit(functools.partial(module.apply, return_weights=True))
    out, weights = apply(params, X, **call)
    assert weights.shape == (2, N, T, T)
    # Padding attends to nothing: only the bias is left.
    bias = params["params"]["out"]["bias"]
    np.testing.assert_array_equal(out[1, 6:], np.broadcast_to(bias, (T - 6, D)))
    cached = module.clone(decode=True, cache=CacheConfig(dtype=cache))
    found = decoded(cached, params, X, (T,), **call)
    assert error(found, out) < {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.03}[cache]


def test_qkv_features_are_divided_over_heads() -> None:
    """Rotated features do not count. The default is the number of input features."""
    wanted = jax.eval_shape(layer().init, KEY, X)
    actual = jax.eval_shape(layer(head_dim=None, qkv_features=N * H).init, KEY, X)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), actual, wanted)
    kernel = jax.eval_shape(layer(head_dim=None).init, KEY, X)["params"]["key"]["kernel"]
    assert kernel.shape == (RANK, N, D // N)
