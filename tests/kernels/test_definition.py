"""The definition: against the oracle, and every kernel that runs here against the definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention
from flax_mha.kernels import definition
from flax_mha.kernels.call.bind import bind_call
from flax_mha.masks import Causal, Segments, Window
from flax_mha.scores import Alibi, Relative, SoftCap
from tests.kernels import cases
from tests.kernels.cases import KERNELS, Case
from tests.kernels.problems import problem_of
from tests.kernels.test_contract import bounds, errors
from tests.support import oracle

B, T, S, N, K, H, HV = 2, 7, 9, 4, 2, 8, 5
IDS = np.array([[0, 0, 1, 1, 1, 2, 2, 2, 2], [3, 0, 0, 0, 0, 1, 1, 1, 1]])
SEGMENTS = Segments(IDS[:, :T] + 1, IDS)  # Some queries see no key.
DROPOUT = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(2)}


def define(q: Any, k: Any, v: Any, **call: Any) -> Any:
    """Return the output and the lse by the definition."""
    out, sums = definition.attend(*bind_call(q, k, v, **call))
    return out, sums.lse


@pytest.mark.sampled(0.02, slow=0)
@pytest.mark.parametrize("case", cases.ordinary(), ids=str)
def test_definition_matches_oracle(case: Case) -> None:
    problem = problem_of(case)
    mask, q_positions, kv_positions = problem.given

    def attend(qkv: Any, learned: Any) -> Any:
        of_call = {"mask": mask, "q_positions": q_positions, "kv_positions": kv_positions}
        return define(*qkv, **of_call, **problem.call(learned))

    (out, lse), pull = jax.vjp(jax.jit(attend), problem.qkv, problem.learned)
    dqkv, dlearned = pull(problem.cotangents)
    assert out.dtype == problem.qkv[0].dtype
    found = errors(
        problem, {"out": out, "lse": lse, **dict(zip("qkv", dqkv, strict=True)), **dlearned}
    )
    allowed = bounds(problem)
    assert not {name: x for name, x in found.items() if not x <= allowed[name]}


# Each call as a function of learned arrays by name.
CALLS: dict[str, Any] = {
    "mask": lambda x: {"mask": Causal() & SEGMENTS},
    "scores": lambda x: {"scores": (SoftCap(2.0), Alibi(x["slopes"])), "bias": x["bias"]},
    "vectors": lambda x: {"mask": Window(2, 3), "scores": (Relative(x["rows"]),)},
    "sinks and dropout": lambda x: {"mask": SEGMENTS, "sinks": x["sinks"], **DROPOUT},
    "positions": lambda x: {"mask": Causal(), "q_positions": np.arange(T) * 2 % 9, "scale": 0.7},
    "sigmoid": lambda x: {"mask": SEGMENTS, "normalizer": "sigmoid"},
    "softpick": lambda x: {"mask": SEGMENTS, "normalizer": "softpick"},
}
SHAPES = {"slopes": (N,), "bias": (N, T, S), "rows": (7, H), "sinks": (N,)}


@pytest.mark.sampled(0.15, slow=0)
@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (kernel, name)
        for kernel in (*KERNELS, "decode")
        for name in CALLS
        if kernel == "reference" or name not in ("sigmoid", "softpick")
    ],
)
def test_kernels_compute_the_definition(kernel: str, name: str) -> None:
    """Outputs, the lse, and the gradients of all arrays."""
    rng = np.random.default_rng(3)
    sizes = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, HV), **SHAPES}
    x = {key: jnp.asarray(rng.normal(size=size), jnp.float32) for key, size in sizes.items()}
    has_lse = "normalizer" not in CALLS[name](x)

    def run(x: Any) -> Any:
        found = dot_product_attention(
            x["q"], x["k"], x["v"], kernel=kernel, return_residuals=has_lse, **CALLS[name](x)
        )
        return found if has_lse else (found, None)

    def wanted(x: Any) -> Any:
        out, lse = define(x["q"], x["k"], x["v"], **CALLS[name](x))
        return out, lse if has_lse else None

    def results(fn: Any) -> Any:
        def loss(x: Any) -> Any:
            out, lse = fn(x)
            seen = 0.0 if lse is None else jnp.where(lse > -jnp.inf, lse, 0.0).sum()
            return (out**2).sum() + seen, (out, lse)

        (_, values), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
        return values, gradients

    (got, gradients), (want, expected) = results(run), results(wanted)
    assert oracle.error(got[0], want[0]) < 2e-6
    if has_lse:
        np.testing.assert_allclose(got[1], want[1], rtol=2e-6, atol=2e-6)
    for key, gradient in gradients.items():
        assert oracle.error(gradient, expected[key]) < 1e-5, key
