"""Captured values beside the output, which they do not change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import Capture, MultiHeadAttention, dot_product_attention, masks, scores
from flax_mha.kernels import observe
from tests.kernels.cases import KERNELS, pairs
from tests.kernels.oracle_check import B, H, N, arrays, table
from tests.support import oracle
from tests.support.arrays import ones

NAMES = ("weights", "lse", "entropy", "max_logit")
T, S = 70, 90
IDS = np.sort(np.random.default_rng(0).integers(0, 3, (B, S)), axis=1)
MASKS = {
    "none": None,
    "causal": masks.Causal(),
    # The second row's queries of segment 1 are fully masked.
    "empty rows": masks.Segments(jnp.asarray(IDS[:, :T]), jnp.asarray(np.where(IDS == 1, 3, IDS))),
    "window": masks.Window(4, 2) & masks.Lengths(np.array([60, 0])),
    "nothing for a part": masks.Lengths(np.full(B, S), q=np.full(B, 20)),
    "per head": masks.PerHead([masks.Causal(), masks.Window(3), ~masks.Causal(), masks.Prefix(9)]),
}
EXTRAS = {
    "plain": ({}, {}),
    "all": (
        {"scores": (scores.SoftCap(2.0),), "bias": "bias", "sinks": "sinks"},
        {"scores": [oracle.ScoreRule.soft_cap(2.0)], "bias": "bias", "sinks": "sinks"},
    ),
}
ARRAYS = {
    "bias": np.random.default_rng(1).normal(size=(N, T, S)).astype(np.float32),
    "sinks": np.array([0.0, 2.0, -1.0, 4.0], np.float32),
}


def expected(q, k, allowed=None, **known) -> dict[str, np.ndarray]:
    """Compute the definitions in float64."""
    _, lse, p = oracle.attention(q, k, k, allowed=allowed, **known)
    with np.errstate(divide="ignore"):
        log = np.where(p > 0, np.log(p), 0.0)
        top = lse + np.log(p.max(-1))
    entropy = -(p * log).sum(-1)
    if "sinks" in known:
        share = np.exp(oracle.float64(known["sinks"])[:, None] - lse)
        entropy -= share * np.log(share)
    return {"weights": p, "lse": lse, "entropy": entropy, "max_logit": top}


def close(actual, wanted, atol: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, atol=atol)


# All pairs of these occur, not their whole product.
DEFINED = pairs(
    kernel=KERNELS, K=(4, 1), mask=(*MASKS,), extras=(*EXTRAS,), is_blocked=(False, True)
)


@pytest.mark.sampled(0.024)
@pytest.mark.parametrize(("kernel", "K", "mask", "extras", "is_blocked"), DEFINED)
def test_captured_values_match_definitions(
    kernel: str, K: int, mask: str, extras: str, is_blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of queries leave out the keys that none of them may see."""
    if is_blocked:
        monkeypatch.setattr(observe, "_SCORES", 1)  # 16 queries per block: the last is partial.
    q, k, v, _ = arrays(T, S, K)
    call, known = ({name: ARRAYS.get(x, x) if isinstance(x, str) else x for name, x in d.items()}
                   for d in EXTRAS[extras])  # fmt: skip
    some = Capture(("weights", "entropy"), heads=(3, -4), queries=range(5, 60, 7))

    @jax.jit
    def run(*qkv):
        attend = functools.partial(
            dot_product_attention, *qkv, mask=MASKS[mask], kernel=kernel, **call
        )
        return attend(), attend(capture=Capture(NAMES)), attend(capture=some)[1]

    plain, (out, captured), some = run(q, k, v)
    np.testing.assert_array_equal(out, plain)
    wanted = expected(q, k, table(MASKS[mask], T, S), **known)
    assert captured.keys() == {*NAMES}
    assert captured["weights"].dtype == out.dtype
    for name, value in captured.items():
        close(value, wanted[name])
    for name, value in some.items():
        close(value, wanted[name][:, [3, 0], 5:60:7])


@pytest.mark.slow
def test_gradients_of_captured_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_SCORES", 1)
    q, k, v, _ = arrays(T, S, 2)
    mask = MASKS["empty rows"]
    rng = np.random.default_rng(2)
    weight = {name: rng.normal(size=(B, N, T)) for name in ("entropy", "max_logit", "lse")}

    def loss(q, k, name):
        captured = dot_product_attention(q, k, v, mask=mask, capture=Capture((name,)))[1][name]
        return jnp.sum(jnp.where(captured == -jnp.inf, 0.0, captured) * weight[name])

    found = expected(q, k, table(mask, T, S))
    p, scale, keys = found["weights"], H**-0.5, np.repeat(oracle.float64(k), 2, -2)
    with np.errstate(divide="ignore"):
        log = np.where(p > 0, np.log(p), 0.0)
    derivatives = {
        "entropy": -p * (log + found["entropy"][..., None]),
        "max_logit": (p == p.max(-1, keepdims=True)) * (p > 0),
        "lse": p,
    }
    for name, ds in derivatives.items():
        ds = ds * weight[name][..., None] * scale
        dq, dk = jax.jit(jax.grad(functools.partial(loss, name=name), (0, 1)))(q, k)
        assert oracle.error(dq, np.einsum("bnts,bsnh->btnh", ds, keys)) < 1e-5
        dk_all = np.einsum("bnts,btnh->bsnh", ds, oracle.float64(q))
        assert oracle.error(dk, oracle.grouped(dk_all, 2)) < 1e-5


@pytest.mark.slow
def test_entropy_needs_no_score_table() -> None:
    t = 8192
    q = jax.ShapeDtypeStruct((1, t, 2, 8), jnp.float32)

    def loss(q):
        captured = dot_product_attention(
            q, q, q, mask=masks.Causal(), capture=Capture(("entropy", "max_logit"))
        )
        return captured[1]["entropy"].sum()

    program = jax.jit(jax.grad(loss)).lower(q).compile()
    # A table of scores would take 512 MiB.
    assert program.memory_analysis().temp_size_in_bytes < 2**27


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 4, 4)], ids=str)
def test_capture_without_rows_queries_or_keys(sizes: tuple[int, int, int]) -> None:
    b, t, s = sizes
    q, k = ones((b, t, N, H)), ones((b, s, N, H))
    _, seen = jax.jit(lambda q, k: dot_product_attention(q, k, k, capture=Capture(NAMES)))(q, k)
    assert seen["weights"].shape == (b, N, t, s)
    np.testing.assert_array_equal(seen["entropy"], np.zeros((b, N, t)))
    np.testing.assert_array_equal(seen["max_logit"], np.full((b, N, t), -np.inf))


X = jax.device_put(np.random.default_rng(0).normal(size=(2, 12, 16)).astype(np.float32))


@pytest.mark.slow
def test_layer_sows_captured_values() -> None:
    layer = MultiHeadAttention(
        4, num_kv_heads=2, mask=masks.Causal(), sinks=True,
        capture=Capture(NAMES, heads=(1,), queries=range(4)),
    )  # fmt: skip
    params = layer.init(jax.random.key(1), X)
    assert list(params) == ["params"]
    plain = layer.apply(params, X)
    (out, weights), sown = layer.apply(params, X, return_weights=True, mutable="intermediates")
    np.testing.assert_array_equal(out, plain)
    sown = {name: value[0] for name, value in sown["intermediates"].items()}
    np.testing.assert_array_equal(sown["attention_weights"], weights[:, 1:2, :4])
    assert sown.keys() == {f"attention_{name}" for name in NAMES}
    # Sown once, even if the call asks for it too.
    _, again = layer.apply(params, X, sow_weights=True, mutable="intermediates")
    assert len(again["intermediates"]["attention_weights"]) == 1


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("per_row", [False, True])
def test_head_mask_scales_heads(per_row: bool) -> None:
    layer = MultiHeadAttention(4, project_out=False)
    params = oracle.random_like(jax.eval_shape(layer.init, jax.random.key(1), X))
    scale = np.float32([0, 1, 2, 0.5])
    if per_row:
        scale = np.stack([scale, 1 - scale])

    @jax.jit
    def run(scale):
        out, pull = jax.vjp(lambda x: layer.apply(params, X, head_mask=x), scale)
        return out.reshape(2, 12, 4, 4), *pull(jnp.ones_like(out))

    heads, _ = map(np.asarray, run(np.ones_like(scale)))
    out, gradient = run(scale)
    wanted = heads * np.broadcast_to(scale, (2, 4))[:, None, :, None]
    np.testing.assert_allclose(out, wanted, rtol=1e-6)
    by_row = heads.sum((1, 3))
    np.testing.assert_allclose(gradient, by_row if per_row else by_row.sum(0), rtol=1e-4)
