"""Differential attention against its formula, and the features that every layer has."""

from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import masks, scores
from flax_mha.positions import Rotary
from flax_mha.variants import DifferentialAttention
from tests.support import oracle
from tests.support.layer_checks import drawn
from tests.support.oracle import error, float64

N, K, H, D, T = 4, 2, 6, 16, 10
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)


def layer(**fields: Any) -> DifferentialAttention:
    defaults: dict[str, Any] = {
        "num_kv_heads": K, "head_dim": H, "rotary": Rotary(100.0), "mask": masks.Causal(),
        "offset": 0.3,
    }  # fmt: skip
    return DifferentialAttention(N, **defaults | fields)


def expected(params: Any, x: Any) -> np.ndarray:
    x, p = float64(x), float64(params)
    q, k, v = (oracle.project(p[name], x) for name in ("query", "key", "value"))
    q, k = (oracle.rotary(y, np.arange(T), base=100.0) for y in (q, k))
    q = q.reshape(2, T, K, 2, N // K, H)
    k, v = k.reshape(2, T, K, 2, H), v.reshape(2, T, K, 2 * H)
    heads = []
    for n in range(N):
        i, g = divmod(n, N // K)
        maps = []
        for s in range(2):
            scores = np.einsum("bth,bsh->bts", q[:, :, i, s, g], k[:, :, i, s]) / np.sqrt(H)
            scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
            maps.append(np.exp(scores) / np.exp(scores).sum(-1, keepdims=True))
        weight = np.exp(p["lambda_a1"] @ p["lambda_b1"]) - np.exp(p["lambda_a2"] @ p["lambda_b2"])
        out = (maps[0] - (weight + 0.3) * maps[1]) @ v[:, :, i]
        heads.append(0.7 * oracle.rms_norm(p["norm"], out, 1e-5))
    return oracle.project(p["out"], np.stack(heads, 2), contracted=2)


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_differential_attention_matches_formula(kernel: str) -> None:
    module = layer(kernel=kernel)
    params = drawn(module, X)
    assert error(jax.jit(module.apply)(params, X), expected(params["params"], X)) < 5e-6


@pytest.mark.parametrize("K", [4, 2])
def test_learned_scores_have_a_row_for_each_map(K: int) -> None:
    learned = layer(num_kv_heads=K, scores=(scores.RelativeBias(),))
    params = drawn(learned, X)["params"]
    own = {name: y for name, y in params.items() if name != "relative_bias"}
    given = layer(num_kv_heads=K)

    @jax.jit
    def run() -> Any:
        table = (scores.RelativeBias(params["relative_bias"]),)
        return learned.apply({"params": params}, X), given.apply({"params": own}, X, scores=table)

    np.testing.assert_array_equal(*run())
