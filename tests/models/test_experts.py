"""Experts against a loop over tokens, on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import DecoderBlock, Experts, MultiHeadAttention
from tests.models.expert_cases import (
    CLIPPED,
    GROUPED,
    KEY,
    KINDS_OF,
    PLAIN,
    X,
    check_balance,
    choose,
    run,
    use,
)  # fmt: skip
from tests.support.arrays import random_variables
from tests.support.oracle import error, float64


@pytest.fixture(params=["in turn", "by rows"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with each method."""
    use(request.param, monkeypatch)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def expected_output(module: Experts, params: Any, x: Any) -> np.ndarray:
    """Compute one token after another, in float64."""
    w = {name: float64(a) for name, a in params.items() if name not in ("router", "shared")}
    router = {name: np.asarray(a, np.float64) for name, a in params["router"].items()}
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for at in np.ndindex(*x.shape[:-1]):
        logits = x[at] @ router["kernel"] + router.get("bias", 0)
        p = np.exp(logits) / np.exp(logits).sum()
        p = sigmoid(logits) if module.routing == "sigmoid" else p
        chosen = choose(module, params, p)
        whole = (p[chosen].sum() if module.normalize else 1) / module.factor
        for e in chosen:
            gate, up = (x[at] @ w[f"{n}_kernel"][e] for n in ("gate", "up"))
            if module.use_bias:
                gate, up = gate + w["gate_bias"][e], up + w["up_bias"][e]
            if module.limit is not None:
                gate, up = np.minimum(gate, module.limit), np.clip(up, -module.limit, module.limit)
            slope = 1.702 if module.activation == "quick_gelu" else 1
            h = gate * sigmoid(slope * gate) * (up + module.offset)
            y = h @ w["down_kernel"][e] + (w["down_bias"][e] if module.use_bias else 0)
            out[at] += p[e] / whole * y
    if module.shared is None:
        return out
    gate, up, down = (float64(params["shared"][n]["kernel"]) for n in ("gate", "up", "down"))
    return out + (x @ gate * sigmoid(x @ gate) * (x @ up)) @ down


def compiled(module: Experts) -> Any:
    """Return the outputs by the method in force; JAX would take equal methods for one function."""
    return jax.jit(lambda *args: module.apply(*args))


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("name", KINDS_OF)
def test_experts_match_formula(name: str, method: None) -> None:
    params = random_variables(KINDS_OF[name], X)
    expected = expected_output(KINDS_OF[name], params["params"], X)
    assert error(compiled(KINDS_OF[name])(params, X), expected) < 2e-6
    if name == "plain":  # Without a batch, and with two axes of it.
        assert error(compiled(PLAIN)(params, X[0]), expected[0]) < 2e-6
        assert error(compiled(PLAIN)(params, X[None]), expected[None]) < 2e-6


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("module", [CLIPPED, GROUPED])
def test_gradients_match_differences(module: Experts, method: None) -> None:
    """Finite differences of the formula along random directions."""
    params = random_variables(module, X)
    (of_params, of_x), _ = run(module, params, X)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def loss(params: Any, x: Any) -> float:
        return float(np.sin(expected_output(module, params["params"], x)).sum())

    rng, step = np.random.default_rng(1), 1e-6
    leaves, tree = jax.tree.flatten((wide, np.asarray(X, np.float64)))
    got = jax.tree.leaves((of_params, of_x))
    assert len(got) == len(leaves) == 9
    for i, (leaf, gradient) in enumerate(zip(leaves, got, strict=True)):
        along = rng.normal(size=leaf.shape)
        both = []
        for sign in (1, -1):
            moved = [a + sign * step * along if j == i else a for j, a in enumerate(leaves)]
            both.append(loss(*jax.tree.unflatten(tree, moved)))
        wanted = (both[0] - both[1]) / (2 * step)
        # The choice bias has none.
        assert abs(np.vdot(gradient, along) - wanted) <= 1e-4 * np.linalg.norm(gradient)


@pytest.mark.sampled(0.08)
def test_tokens_do_not_affect_each_other(method: None) -> None:
    """NaN in one token, or an overflow in another's expert, reaches no other token."""
    params = random_variables(PLAIN, X)
    apply = compiled(PLAIN)
    clean, dirty = apply(params, X), apply(params, X.at[0, 3].set(jnp.nan).at[1, 2].set(1e30))
    rest = np.ones(X.shape[:-1], bool)
    rest[0, 3] = rest[1, 2] = False
    np.testing.assert_allclose(dirty[rest], clean[rest], atol=1e-6)
    # A token never passes through an expert that it is not routed to, not even to be discarded.
    one = jnp.ones((1, 1, 16))
    params["params"]["router"]["kernel"] = np.tile(-np.arange(8, dtype="f"), (16, 1))
    params["params"]["up_kernel"][2:] = 3e38  # Their sum is infinite.
    (of_params, of_x), y = run(PLAIN, params, one)
    assert np.isfinite(y).all()
    assert np.isfinite(of_x).all()
    assert all(np.isfinite(x[:2]).all() for x in jax.tree.leaves(of_params))


@pytest.mark.sampled(0.08)
def test_padding_does_not_affect_experts(method: None) -> None:
    block = DecoderBlock(MultiHeadAttention(2), mlp=CLIPPED, norm="rmsnorm")
    lengths = jnp.array([8, 3, 5, 0])
    real = np.arange(8)[None] < lengths[:, None]
    params = random_variables(block, X)

    def loss(params: Any, x: Any) -> Any:
        y = block.apply(params, x, lengths=lengths)
        return jnp.sum(jnp.where(real[..., None], jnp.sin(y), 0)), y

    fn = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    (got, of_x), y = fn(params, jnp.where(real[..., None], X, jnp.nan))
    (wanted, _), expected = fn(params, X)
    np.testing.assert_allclose(y[real], expected[real], atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)
    assert not np.any(of_x[~real])


def test_bfloat16_experts_are_close(method: None) -> None:
    every = CLIPPED.clone(top_k=8)  # With all experts, no choice depends on the last digit.
    params = random_variables(every, X)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    y = compiled(every)(half, X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda a: np.asarray(a, np.float32), half)
    x = X.astype(jnp.bfloat16).astype(jnp.float32)
    assert error(y.astype(jnp.float32), expected_output(every, wide["params"], x)) < 0.02
    cast = jax.eval_shape(every.clone(dtype=jnp.bfloat16).apply, params, X)
    assert cast.dtype == jnp.bfloat16


@pytest.mark.sampled(0.08)
def test_experts_start_differently() -> None:
    """With the scale of a single kernel, as in `MLP`."""
    init = jax.jit(lambda x: Experts(512, 4, 1).init(KEY, x)["params"]["up_kernel"])
    kernels = np.asarray(init(np.ones((1, 1, 256), "f")))
    np.testing.assert_allclose(kernels.std((1, 2)), 256**-0.5, rtol=0.02)
    assert np.abs(kernels[0] - kernels[1]).max() > 0.01


def test_expert_by_expert_needs_memory_of_one_expert() -> None:
    """On CPUs `ragged_dot` computes all experts at once."""
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    module = Experts(128, 16, 2)
    params = jax.eval_shape(module.init, KEY, x)
    compiled = jax.jit(module.apply).lower(params, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 512 * 128 * 4 / 4


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("name", ["plain", "clipped", "one"])
def test_balance_loss_matches_formula(name: str) -> None:
    params = random_variables(KINDS_OF[name], X)
    assert "intermediates" not in jax.eval_shape(KINDS_OF[name].init, KEY, X)
    check_balance(KINDS_OF[name], params, X, params["params"]["router"])
