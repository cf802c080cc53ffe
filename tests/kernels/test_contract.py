"""Every kernel, every mask, score and dtype, over several tiles, against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention
from flax_mha.grid import whole
from flax_mha.masks import (
    Causal,
    Dense,
    Lengths,
    PerHead,
    Predicate,
    Prefix,
    Segments,
    Window,
)
from flax_mha.scores import Alibi, Bias, RelativeBias, Score, SoftCap, relative_bucket
from flax_mha.shapes import Dims
from tests import oracle

# Those that run every call, anywhere.
KERNELS = ("blockwise", "reference")
B, N, H, HV = 2, 4, 8, 5
T = S = 300
RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(0, 4, (B, T)), axis=1)
MASKS = {
    "none": None,
    "causal": Causal(),
    "window": Window(20, 3),
    "causal window": Causal() & Window(left=10),
    "lengths": Lengths(jnp.array([100, 0])),
    "lengths per query": Lengths(jnp.asarray(RNG.integers(0, S, (B, T)))),
    "segments": Segments(jnp.asarray(IDS)),
    "packed": Causal() & Segments(IDS),
    "prefix": Prefix(40),
    "prefix per row": Prefix(jnp.array([10, 200])),
    "dense": Dense(jnp.asarray(RNG.random((B, N, T, S)) < 0.2)),
    "dense known": Dense(np.kron(RNG.random((30, 30)) < 0.3, np.ones((10, 10))) > 0),
    "predicate": Predicate(lambda b, n, i, j, m: (i + j + n) % m == 0, (jnp.array(3),)),
    "per head": PerHead([Causal(), Window(4, 4), ~Causal(), Causal() | Window(0, 9)]),
    "not": ~(Causal() & Segments(IDS)),
}
# Forward and gradients, relative to the norm. Half precision: the inputs' rounding, passed on.
TOLERANCE = {"float32": (2e-6, 1e-5), "bfloat16": (1e-2, 3e-2), "float16": (1.5e-3, 4e-3)}


def arrays(t: int, s: int, K: int, dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(1)
    sizes = [(t, N, H), (s, K, H), (s, K, HV), (t, N, HV)]
    return [jnp.asarray(rng.normal(size=(B, *size)), dtype) for size in sizes]


def table(mask, t: int, s: int) -> np.ndarray | None:
    dims = Dims((B,), t, s, N, N, H, HV)
    return None if mask is None else np.asarray(mask.bind(dims).allowed(whole(dims)))


def check(kernel: str, operands: list[jax.Array], known: dict, call, learned: dict) -> None:
    """Holds outputs, lse and all gradients of call(learned) against the oracle's."""
    *qkv, cotangent = operands

    @jax.jit
    def run(qkv, learned):
        out, pull, lse = jax.vjp(
            lambda qkv, learned: dot_product_attention(
                *qkv, kernel=kernel, return_residuals=True, **call(learned)
            ),
            qkv, learned, has_aux=True,
        )  # fmt: skip
        return out, lse, *pull(cotangent)

    out, lse, gradients, learned_gradients = run(qkv, learned)
    expected, expected_lse, _ = oracle.attention(*qkv, **known)
    exact = oracle.attention_gradients(*qkv, cotangent=cotangent, **known)
    forward, backward = TOLERANCE[out.dtype.name]
    assert oracle.error(out, expected) < forward
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=2e-5)
    for got, want in zip(gradients, exact, strict=False):
        assert oracle.error(got, want) < backward
    for name, got in learned_gradients.items():
        assert oracle.error(got, getattr(exact, name)) < backward


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(kernel: str, mask: str) -> None:
    allowed = table(MASKS[mask], T, S)
    known = {"allowed": allowed}
    check(kernel, arrays(T, S, 2), known, lambda _: {"mask": MASKS[mask]}, {})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mask", ["causal", "segments"])
def test_half_precision(kernel: str, dtype: str, mask: str) -> None:
    known = {"allowed": table(MASKS[mask], T, S)}
    check(kernel, arrays(T, S, 2, dtype), known, lambda _: {"mask": MASKS[mask]}, {})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize(("t", "s"), [(1, 1), (7, 64), (129, 257), (520, 260), (1, 600)])
def test_sizes(kernel: str, K: int, t: int, s: int) -> None:
    """No multiple of anything is asked for."""
    mask = Causal() | Window(3, 3)
    known = {"allowed": table(mask, t, s)}
    check(kernel, arrays(t, s, K), known, lambda _: {"mask": mask}, {})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(T, S), (N, 1, S), (B, 1, 1, S), (S,), (B, N, T, S)])
@pytest.mark.parametrize("as_score", [False, True])
def test_bias(kernel: str, shape: tuple[int, ...], as_score: bool) -> None:
    bias = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    known = {"allowed": table(Causal(), T, S), "bias": bias}

    def call(learned):
        bias = learned["bias"]
        return {"mask": Causal(), **({"scores": (Bias(bias),)} if as_score else {"bias": bias})}

    check(kernel, arrays(T, S, 2), known, call, {"bias": bias})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", ["none", "causal", "lengths"])
def test_sinks_and_soft_cap(kernel: str, mask: str) -> None:
    sinks = jnp.array([0.0, 1.0, -2.0, 5.0])
    known = {"allowed": table(MASKS[mask], T, S), "sinks": sinks, "cap": 1.5}
    *qkv, cotangent = arrays(T, S, 2)
    operands = [4 * qkv[0], *qkv[1:], cotangent]

    def call(learned):
        return {"mask": MASKS[mask], "scores": (SoftCap(1.5),), "sinks": learned["sinks"]}

    check(kernel, operands, known, call, {"sinks": sinks})


@pytest.mark.parametrize("kernel", KERNELS)
def test_alibi_and_relative_bias_are_biases(kernel: str) -> None:
    slopes = jnp.array([0.5, 0.25, 0.1, 0.0])
    biases = jnp.asarray(RNG.normal(size=(N, 32)), jnp.float32)
    q, k, v, cotangent = arrays(T, S, 2)
    distance = np.arange(S) - np.arange(T)[:, None]
    bucket = np.asarray(relative_bucket(jnp.asarray(distance), 32))
    bias = np.asarray(biases)[:, bucket] - np.abs(distance) * np.asarray(slopes)[:, None, None]

    @jax.jit
    def run(slopes, biases):
        out, pull = jax.vjp(
            lambda slopes, biases: dot_product_attention(
                q, k, v, mask=Causal(), kernel=kernel,
                scores=(Alibi(slopes), RelativeBias(biases)),
            ),
            slopes, biases,
        )  # fmt: skip
        return out, pull(cotangent)

    out, (dslopes, dbiases) = run(slopes, biases)
    known = {"allowed": table(Causal(), T, S), "bias": bias}
    expected, _, _ = oracle.attention(q, k, v, **known)
    gradient = oracle.attention_gradients(q, k, v, cotangent=cotangent, **known).bias
    assert oracle.error(out, expected) < 2e-6
    assert oracle.error(dslopes, -(gradient * np.abs(distance)).sum((-1, -2))) < 1e-5
    by_bucket = np.stack([(gradient * (bucket == n)).sum((-1, -2)) for n in range(32)], -1)
    assert oracle.error(dbiases, by_bucket) < 1e-5


@pytest.mark.parametrize("mask", ["none", "causal", "lengths per query"])
def test_kernels_agree_on_what_has_no_oracle(mask: str) -> None:
    """Dropout bit by bit, and scores of one's own with gradients of their arguments."""
    q, k, v, cotangent = arrays(T, S, 2)
    results = []
    for kernel in KERNELS:

        @jax.jit
        def run(q, k, v, w, kernel=kernel):
            out, pull = jax.vjp(
                lambda q, k, v, w: dot_product_attention(
                    q, k, v, mask=MASKS[mask], kernel=kernel, dropout_rate=0.3,
                    dropout_rng=jax.random.key(7),
                    scores=(Score(lambda s, b, n, i, j, w: s * (1 + w * jnp.cos(i - j)), (w,)),),
                ),
                q, k, v, w,
            )  # fmt: skip
            return out, *pull(cotangent)

        results.append(run(q, k, v, jnp.float32(0.5)))
    for got, want in zip(*results, strict=True):
        assert oracle.error(got, want) < 1e-5


def test_memory_grows_with_the_length_not_its_square() -> None:
    """The forward and backward pass at T = 32,768 would need 4 GiB for the scores of a head."""
    x = jax.ShapeDtypeStruct((32768, 1, 8), jnp.float32)

    def loss(q, k, v):
        return dot_product_attention(q, k, v, mask=Causal(), kernel="blockwise").sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20
