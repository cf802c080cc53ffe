"""Talking-heads attention against its formula, and the features that every layer has."""

from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, masks
from flax_mha.positions import Rotary
from flax_mha.variants import TalkingHeadsAttention
from tests.support import oracle
from tests.support.layer_checks import check_gradients, drawn
from tests.support.oracle import einsum, error, float64

N, K, H, D, T = 4, 2, 6, 16, 10
KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)


def layer(**fields: Any) -> TalkingHeadsAttention:
    return TalkingHeadsAttention(N, **{"num_kv_heads": K, "head_dim": H} | fields)


def expected(params: Any, x: Any) -> np.ndarray:
    """Compute the definition with a causal mask, all heads' scores at once."""
    p, x = float64(params), float64(x)
    q, k, v = (oracle.project(p[name], x) for name in ("query", "key", "value"))
    k, v = (np.repeat(y, N // K, 2) for y in (k, v))
    scores = einsum("btmh,bsmh,mn->bnts", q, k, p["mix_scores"]) / np.sqrt(H)
    scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = einsum("bmts,bsnh,mn->btnh", weights, v, p["mix_weights"])
    return oracle.project(p["out"], out, contracted=2)


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_talking_heads_match_formula(kernel: str) -> None:
    module = layer(kernel=kernel, mask=masks.Causal())
    params = drawn(module, X)
    assert error(jax.jit(module.apply)(params, X), expected(params["params"], X)) < 5e-6


@pytest.mark.sampled(0.08)
def test_mix_gradients_match_differences() -> None:
    groups = ("mix_scores",), ("mix_weights",), ("query", "key", "value", "out")
    check_gradients(layer(kernel="blockwise", mask=masks.Causal()), X, expected, *groups)


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("across", [False, True])
def test_initial_layer_equals_multi_head_attention(across: bool) -> None:
    """With norms, gates, rotary, sinks, lengths and head_mask. In cross-attention too."""
    fields: dict[str, Any] = {
        "num_kv_heads": K, "head_dim": H, "gate": "feature", "normalize_qk": True, "sinks": True,
        "rotary": Rotary(), "v_head_dim": 5,
    }  # fmt: skip
    ours, plain = TalkingHeadsAttention(N, **fields), MultiHeadAttention(N, **fields)
    variables = drawn(plain, X)
    mixes = {"mix_scores": np.eye(N, dtype=np.float32), "mix_weights": np.eye(N, dtype=np.float32)}
    call = {"lengths": np.array([T, 4]), "head_mask": np.array([1.0, 0.0, 0.5, 1.0], np.float32)}
    inputs, call = ((X, X[:, :7]), {}) if across else ((X,), call)

    @jax.jit
    def run() -> Any:
        initial = ours.init(KEY, X)["params"]
        both = {"params": {**variables["params"], **{name: initial[name] for name in mixes}}}
        return initial, *(
            layer.apply(params, *inputs, **call, return_weights=True)
            for layer, params in ((ours, both), (plain, variables))
        )

    initial, actual, wanted = run()
    for name, eye in mixes.items():
        np.testing.assert_array_equal(initial[name], eye)
    for x, y in zip(actual, wanted, strict=True):
        assert error(x, y) < 5e-6
