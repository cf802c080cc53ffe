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

NAMES = ("weights", "lse", "entropy", "max_logit")
T, S = 70, 90
IDS = np.sort(np.random.default_rng(0).integers(0, 3, (B, S)), axis=1)
MASKS = {
    "none": None,
    "causal": masks.Causal(),
    # The second row's queries of segment 1 are fully masked.
    "empty rows": masks.Segments(jnp.asarray(IDS[:, :T]), jnp.asarray(np.where(IDS == 1, 3, IDS))),
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
DEFINED = pairs(kernel=KERNELS, K=(4, 1), mask=(*MASKS,), extras=(*EXTRAS,))


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("kernel", "K", "mask", "extras"), DEFINED)
def test_captured_values_match_definitions(kernel: str, K: int, mask: str, extras: str) -> None:
    q, k, v, _ = arrays(T, S, K)
    call, known = ({name: ARRAYS.get(x, x) if isinstance(x, str) else x for name, x in d.items()}
                   for d in EXTRAS[extras])  # fmt: skip
    attend = functools.partial(
        dot_product_attention, q, k, v, mask=MASKS[mask], kernel=kernel, **call
    )
    out, captured = attend(capture=Capture(NAMES))
    np.testing.assert_array_equal(out, attend())
    wanted = expected(q, k, table(MASKS[mask], T, S), **known)
    assert list(captured) == list(NAMES)
    for name, value in captured.items():
        close(value, wanted[name])
    some = attend(capture=Capture(("weights", "entropy"), heads=(3, -4), queries=range(5, 60, 7)))[
        1
    ]
    for name, value in some.items():
        close(value, wanted[name][:, [3, 0], 5:60:7])


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [False, True])
def test_gradients_of_captured_values(blocked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocked:
        monkeypatch.setattr(observe, "_SCORES", 1)  # 16 queries per block: the last is partial.
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


IN_PARTS = {
    "causal": masks.Causal(),
    "window": masks.Window(4, 2) & masks.Lengths(np.array([60, 0])),
    "per head": MASKS["per head"],
    "keys after": ~masks.Causal(),
    "nothing for a part": masks.Lengths(np.full(B, S), q=np.full(B, 20)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PARTS)
def test_capture_in_blocks_matches_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block leaves out the keys that none of its queries may see."""
    q, k, v, _ = arrays(T, S, 2)
    call = {"bias": ARRAYS["bias"], "sinks": ARRAYS["sinks"], "mask": IN_PARTS[name]}

    def captured(names: tuple, q: jax.Array) -> dict:
        return dot_product_attention(q, k, v, **call, capture=Capture(names))[1]

    def slope(q: jax.Array) -> jax.Array:
        found = captured(("entropy", "max_logit"), q)
        return sum(jnp.where(x == -jnp.inf, 0.0, jnp.sin(x)).sum() for x in found.values())

    dq = jax.jit(jax.grad(slope))(q)
    monkeypatch.setattr(observe, "_SCORES", 1)
    wanted = expected(q, k, table(IN_PARTS[name], T, S), bias=call["bias"], sinks=call["sinks"])
    for names in (("max_logit",), ("entropy", "max_logit")):
        for part, value in jax.jit(functools.partial(captured, names))(q).items():
            close(value, wanted[part])
    close(jax.jit(jax.grad(lambda q: slope(q)))(q), dq)


# A length, and whether it is compiled.
RUNS = {"short": (30, True), "eager": (30, False), "long": (600, True)}


# All pairs of these occur, not their whole product.
@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("kernel", "dtype", "name"),
    pairs(kernel=KERNELS, dtype=("float32", "bfloat16"), name=(*RUNS,)),
)
def test_capture_does_not_change_output(kernel: str, dtype: str, name: str) -> None:
    """Outputs and gradients are bitwise equal, compiled or not, long and short."""
    t, is_compiled = RUNS[name]
    q, k, v, cotangent = arrays(t, t, 2, dtype)
    key = jax.random.key(0)

    def run(q, capture=None):
        result = dot_product_attention(
            q, k, v, mask=masks.Causal(), kernel=kernel, capture=capture,
            dropout_rate=0.1, dropout_rng=key,
        )  # fmt: skip
        out, captured = result if capture else (result, {})
        return jnp.sum(out * cotangent), (out, captured)

    def both(capture):
        slope = jax.value_and_grad(functools.partial(run, capture=capture), has_aux=True)
        return (jax.jit(slope) if is_compiled else slope)(q)

    (_, (plain, _)), plain_dq = both(None)
    (_, (out, seen)), dq = both(Capture(NAMES))
    np.testing.assert_array_equal(out, plain)
    np.testing.assert_array_equal(dq, plain_dq)
    assert seen["weights"].dtype == q.dtype
    assert seen["entropy"].dtype == jnp.float32


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


@pytest.mark.sampled(0.13, slow=0.2)
def test_capture_without_queries_or_keys() -> None:
    for t, s in ((0, 5), (5, 0)):
        _, seen = dot_product_attention(*arrays(t, s, 4)[:3], capture=Capture(NAMES))
        assert seen["entropy"].shape == (B, N, t)
        assert not seen["entropy"].any()
        assert (seen["max_logit"] == -np.inf).all()


@pytest.mark.slow
def test_vmapped_capture_matches_batch() -> None:
    q, k, v, _ = arrays(T, S, 2)
    run = functools.partial(dot_product_attention, mask=masks.Causal(), capture=Capture(NAMES))
    for a, b in zip(*map(jax.tree.leaves, (jax.vmap(run)(q, k, v), run(q, k, v))), strict=True):
        close(a, b, 1e-6)


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
    assert {name: x.shape for name, x in sown.items()} == {
        "attention_weights": (2, 1, 4, 12),
        "attention_lse": (2, 1, 4),
        "attention_entropy": (2, 1, 4),
        "attention_max_logit": (2, 1, 4),
    }
    # Sown once, even if the call asks for it too.
    _, again = layer.apply(params, X, sow_weights=True, mutable="intermediates")
    assert len(again["intermediates"]["attention_weights"]) == 1


@pytest.mark.slow
def test_decoding_captures_like_full_forward() -> None:
    layer = MultiHeadAttention(4, decode=True, capture=Capture(("entropy",)))
    whole = MultiHeadAttention(4, mask=masks.Causal(), capture=Capture(("entropy",)))
    variables = layer.init(jax.random.key(1), X)
    _, sown = whole.apply({"params": variables["params"]}, X, mutable="intermediates")
    entropy = sown["intermediates"]["attention_entropy"][0]
    for t in range(0, 12, 3):
        _, new = layer.apply(variables, X[:, t : t + 3], mutable=["cache", "intermediates"])
        variables["cache"] = new["cache"]
        close(new["intermediates"]["attention_entropy"][0], entropy[:, :, t : t + 3])


@pytest.mark.parametrize("per_row", [False, True])
def test_head_mask_scales_heads(per_row: bool) -> None:
    layer = MultiHeadAttention(4, project_out=False)
    params = oracle.random_like(jax.eval_shape(layer.init, jax.random.key(1), X))
    scale = jnp.array([0.0, 1.0, 2.0, 0.5])
    if per_row:
        scale = jnp.stack([scale, 1 - scale])

    def run(scale):
        return layer.apply(params, X, head_mask=scale)

    heads = layer.apply(params, X).reshape(2, 12, 4, 4)
    wanted = heads * jnp.broadcast_to(scale, (2, 4))[:, None, :, None]
    np.testing.assert_allclose(run(scale).reshape(heads.shape), wanted, rtol=1e-6)
    gradient = jax.grad(lambda scale: run(scale).sum())(scale)
    by_row = heads.sum((1, 3))
    np.testing.assert_allclose(gradient, by_row if per_row else by_row.sum(0), rtol=1e-4)
    np.testing.assert_array_equal(run(scale > 0), run((scale > 0).astype(int)))


def test_capture_of_empty_batch() -> None:
    q = jnp.ones((0, 4, N, H))
    _, found = dot_product_attention(q, q, q, capture=Capture(NAMES))
    assert found["weights"].shape == (0, N, 4, 4)
    assert found["entropy"].shape == found["max_logit"].shape == (0, N, 4)


@pytest.mark.parametrize("reads", [False, True])
def test_unused_lse_is_not_traced(reads: bool) -> None:
    """In float32 the lse has its own scores and exponentials, which the oldest JAX inlines."""
    q, k, v = (jnp.ones((1, 8, 2, 4)) for _ in range(3))
    program = jax.make_jaxpr(
        functools.partial(dot_product_attention, kernel="reference", return_residuals=reads)
    )(q, k, v)
    names = [eqn.params.get("name", eqn.primitive.name) for eqn in program.jaxpr.eqns]
    assert len([x for x in names if x in ("exp", "exponentials")]) == (2 if reads else 1)
