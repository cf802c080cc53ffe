"""Parts of the layer that combine: norms of queries and keys, and gates, against NumPy float64."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import Encoder, EncoderBlock, MultiHeadAttention, QKNorm, masks
from flax_mha.positions import Rotary
from tests.support import oracle
from tests.support.oracle import error, float64, random_like

N, K, H, HV, D, T = 4, 2, 8, 6, 16, 12
KEY = jax.random.key(0)
X = np.random.default_rng(1).normal(size=(2, T, D)).astype(np.float32)
NORMS = {
    "none": None,
    "rms": QKNorm(),
    "rms after, no scale": QKNorm(scale=False, after_rotary=True, epsilon=0.1),
    "layer": QKNorm("layernorm", epsilon=1e-3),
    "layer after": QKNorm("layernorm", after_rotary=True),
    "rms over heads": QKNorm(over_heads=True),
    "layer over heads, after": QKNorm("layernorm", after_rotary=True, over_heads=True),
}
GATES = [None, "head", "feature"]


def layer(norm: str, gate: str | None, **fields: Any) -> MultiHeadAttention:
    defaults: dict[str, Any] = {
        "num_kv_heads": K, "head_dim": H, "v_head_dim": HV, "rotary": Rotary(100.0),
        "mask": masks.Causal(),
    }  # fmt: skip
    return MultiHeadAttention(N, qk_norm=NORMS[norm], gate=gate, **defaults | fields)


def normed(norm: QKNorm, x: np.ndarray, params: Any) -> np.ndarray:
    scale = params["scale"] if norm.scale else np.ones(H)
    function = oracle.rms_norm if norm.kind == "rmsnorm" else oracle.layer_norm
    if norm.over_heads:
        flat = x.reshape(*x.shape[:-2], -1)
        return function({"scale": scale.reshape(-1)}, flat, norm.epsilon).reshape(x.shape)
    return function({"scale": scale}, x, norm.epsilon)


def expected(params: Any, x: np.ndarray, norm: QKNorm | None) -> np.ndarray:
    q, k, v = (oracle.project(params[name], float64(x)) for name in ("query", "key", "value"))
    norms = [params.get("query_ln"), params.get("key_ln")]
    if norm is not None and not norm.after_rotary:
        q, k = (normed(norm, each, p) for each, p in zip((q, k), norms, strict=True))
    q, k = (oracle.rotary(each, np.arange(T), base=100.0) for each in (q, k))
    if norm is not None and norm.after_rotary:
        q, k = (normed(norm, each, p) for each, p in zip((q, k), norms, strict=True))
    out = oracle.attention(q, k, v, allowed=np.tri(T, dtype=bool))[0]
    if "output_gate" in params:
        out = out / (1 + np.exp(-oracle.project(params["output_gate"], float64(x))))
    return np.einsum("btnh,nhd->btd", out, float64(params["out"]["kernel"])) + float64(
        params["out"]["bias"]
    )


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize(("norm", "gate"), list(itertools.product(NORMS, GATES)))
def test_norms_and_gates_match_formula(norm: str, gate: str | None) -> None:
    module = layer(norm, gate)
    params = random_like(jax.eval_shape(module.init, KEY, X))
    assert ("output_gate" in params["params"]) == (gate is not None)
    out = jax.jit(module.apply)(params, X)
    assert error(out, expected(params["params"], X, NORMS[norm])) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_does_not_reach_gradients_under_scan(dtype: str) -> None:
    """Gradients are finite."""
    block = EncoderBlock(layer("rms", "head", dtype=dtype), 8, remat=True)
    stack = Encoder(2, block, scan=True)
    lengths = jnp.array([T, 5])

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y = stack.apply(params, x, lengths=lengths)
        return jnp.sum(jnp.sin(y[1, :5].astype(jnp.float32)))

    bad = np.array(X)
    bad[1, 5:] = np.nan
    pull = jax.jit(jax.grad(loss, (0, 1)))
    # Flax's norms promote their statistics implicitly.
    with jax.numpy_dtype_promotion("standard"):
        params = random_like(jax.eval_shape(stack.init, KEY, X.astype(dtype)))
        (actual, dx), (wanted, _) = (pull(params, jnp.asarray(x, dtype)) for x in (bad, X))
    jax.tree.map(np.testing.assert_array_equal, actual, wanted)
    assert np.isfinite(dx).all()
    assert np.abs(actual["params"]["layers"]["attention"]["output_gate"]["kernel"]).max() > 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: QKNorm("rms"), ValueError, r"kind must be one of \['layernorm', 'rmsnorm'\], got"),
        (lambda: QKNorm(epsilon=-1.0), ValueError, r"epsilon must be at least 0, got -1.0"),
        (lambda: QKNorm(scale=1), TypeError, r"QKNorm.scale must be True or False, got 1"),
        (lambda: QKNorm(over_heads="all"), TypeError, "QKNorm.over_heads must be True or False"),
        (lambda: MultiHeadAttention(4, qk_norm="rmsnorm").init(KEY, X), TypeError,
         r"qk_norm must be a flax_mha.QKNorm, got 'rmsnorm' of str; give QKNorm"),
        (lambda: MultiHeadAttention(4, qk_norm=QKNorm(), normalize_qk=True).init(KEY, X),
         ValueError, r"normalize_qk=True is qk_norm=QKNorm\('layernorm'\), got both"),
        (lambda: MultiHeadAttention(4, gate="heads").init(KEY, X), ValueError,
         r"gate must be one of \['feature', 'head'\], got 'heads'"),
    ],
)  # fmt: skip
def test_invalid_norms_and_gates_raise(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
