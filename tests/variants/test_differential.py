"""Differential attention against its formula, and the features that every layer has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha
from flax_mha import Encoder, EncoderBlock, masks, scores
from flax_mha.analysis import prune
from flax_mha.positions import Rotary
from flax_mha.variants import DifferentialAttention
from tests.support import oracle
from tests.support.decoding import decoded
from tests.support.layer_checks import check_on_mesh, check_under_scan, drawn
from tests.support.oracle import error, float64, random_like

N, K, H, D, T = 4, 2, 6, 16, 10
KEY = jax.random.key(0)
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


@pytest.mark.sampled(0.25, slow=0.2)
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_differential_attention_matches_formula(kernel: str) -> None:
    module = layer(kernel=kernel)
    params = drawn(module, X)
    assert error(jax.jit(module.apply)(params, X), expected(params["params"], X)) < 5e-6


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("steps", [(1,) * T, (4, 6)])
def test_decoding_matches_full_forward(steps: tuple[int, ...]) -> None:
    cached = layer(decode=True)
    params = drawn(layer(), X)
    cache = jax.eval_shape(cached.init, KEY, X)["cache"]
    assert cache["kv"].key.shape == (2, 2 * K, T, H)
    assert cache["kv"].value.shape == (2, 2 * K, T, 2 * H)
    whole = jax.jit(layer().apply)(params, X)
    assert error(decoded(cached, params, X, steps), np.asarray(whole)) < 1e-5


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_heads_match_one_device(kind: str) -> None:
    check_on_mesh(layer(num_kv_heads=4), X, kind, decodes=False)


@pytest.mark.slow
def test_stack_under_scan_and_remat_matches_plain_stack() -> None:
    """With lengths and a head_mask."""
    head_mask = np.array([1.0, 0.0, 0.5, 1.0], np.float32)
    whole, params = check_under_scan(layer(), X, lengths=np.array([T, 4]), head_mask=head_mask)
    bad = np.where(np.arange(T)[:, None] < 4, X, np.nan)
    assert np.isfinite(whole(params, bad, lengths=np.array([4, 4]))).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sinks": True}, "has no sinks"),
        ({"v_head_dim": 3}, "has no v_head_dim"),
        ({"scale": "learned"}, "scale must be a number"),
        ({"offset": "0.8"}, "offset must be a number"),
    ],
)
def test_unsupported_fields_raise(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        jax.eval_shape(layer(**fields).init, KEY, X)


@pytest.mark.parametrize("K", [4, 2])
def test_learned_scores_have_a_row_for_each_map(K: int, rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(2, 6, 16)), jnp.float32)
    layer = DifferentialAttention(4, num_kv_heads=K, head_dim=4, scores=(scores.RelativeBias(),))
    params = random_like(layer.init(jax.random.key(0), x)["params"])
    rest = {name: y for name, y in params.items() if name != "relative_bias"}
    given = scores.RelativeBias(params["relative_bias"])
    expected = layer.clone(scores=()).apply({"params": rest}, x, scores=(given,))
    np.testing.assert_array_equal(layer.apply({"params": params}, x), expected)
    fields: Any = {"num_kv_heads": K, "head_dim": 4, "scores": layer.scores}
    in_nnx = flax_mha.nnx.DifferentialAttention(4, 16, **fields, rngs=nnx.Rngs(0))
    state = nnx.state(in_nnx, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(in_nnx, state)
    np.testing.assert_array_equal(in_nnx(x), expected)


def test_layers_with_learned_scores_lose_heads() -> None:
    own = DifferentialAttention(4, num_kv_heads=2, head_dim=4, scores=(scores.RelativeBias(),))
    model = Encoder(1, EncoderBlock(own, 8))
    variables = random_like(model.init(KEY, X))
    small, fewer = prune(model, variables, {"layers_0/attention": (1, 3)})
    masked = model.apply(variables, X, head_mask=[jnp.array([1.0, 0, 1, 0])])
    np.testing.assert_allclose(small.apply(fewer, X), masked, atol=1e-6)
