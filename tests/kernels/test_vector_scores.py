"""Scores of query and key vectors, against their formulas in NumPy: values and every gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention, masks
from flax_mha.kernels.call.dropout import WeightDropout
from flax_mha.scores import Relative, Score, TransformerXL
from tests.kernels.cases import pairs
from tests.masks.catalogue import Scene
from tests.support import meshes, oracle
from tests.support.arrays import ones
from tests.support.oracle import einsum, error, float64

B, N, K, H, Hv, D = 2, 4, 2, 8, 5, 6
FAR = 5
SCALE = 0.4
KINDS = ("relative", "xl", "score")
TABLES = {
    "relative": [(2 * FAR + 1, H)],
    "xl": [(N, H), (N, H), (D, N, H)], "score": [(N,)],
}  # fmt: skip


def mods(kind: str, *args: Any) -> tuple[Any, ...]:
    if kind == "xl":
        return (TransformerXL(*args),)
    if kind == "score":
        # The norm of each key, whatever its query.
        def fn(s: Any, row: Any, head: Any, i: Any, j: Any, q: Any, k: Any, a: Any) -> Any:
            return s - a[head] * (k**2).sum(-1)[..., None, :]

        return (Score(fn, args, vectors=True),)
    return (Relative(*args),)


class Formula:
    """The bias that a score adds, in float64, and the gradients through it."""

    def __init__(self, kind: str, q: Any, k: Any, i: Any, j: Any, *args: Any) -> None:
        self.kind, self.args = kind, [float64(x) for x in args]
        self.q, self.k = float64(q), np.repeat(float64(k), N // K, -2)
        self.rows = np.clip(j - i[:, None], -FAR, FAR) + FAR
        if kind == "xl":
            u, v, kernel = self.args
            waves = oracle.sinusoidal(i[:, None] - j, D)
            # All sines, then all cosines.
            self.waves = np.concatenate([waves[..., ::2], waves[..., 1::2]], -1)
            self.r = einsum("tsd,dnh->ntsh", self.waves, kernel)
            self.bias = einsum("btnh,ntsh->bnts", SCALE * self.q + v / np.sqrt(H), self.r)
            self.bias += einsum("nh,bsnh->bns", u, self.k)[:, :, None] / np.sqrt(H)
        elif kind == "score":
            self.bias = -(self.args[0] * (self.k**2).sum(-1)).transpose(0, 2, 1)[:, :, None]
            self.bias = np.broadcast_to(self.bias, (B, N, len(i), len(j)))
        else:
            (table,) = self.args
            self.r = np.broadcast_to(table, (N, 2 * FAR + 1, H))[:, self.rows]
            self.bias = SCALE * einsum("btnh,ntsh->bnts", self.q, self.r)

    def gradients(self, ds: np.ndarray) -> tuple[Any, Any, list[np.ndarray]]:
        """Return the gradients of q, of k [B, S, K, H] and of the arrays."""
        if self.kind == "score":
            (a,) = self.args
            per_key = ds.sum(2).transpose(0, 2, 1)
            dk = -2 * (a * per_key)[..., None] * self.k
            return 0.0, oracle.grouped(dk, N // K), [-einsum("bsn,bsnh->n", per_key, self.k**2)]
        dq = SCALE * einsum("bnts,ntsh->btnh", ds, self.r)
        if self.kind == "xl":
            u, v, _ = self.args
            both = SCALE * self.q + v / np.sqrt(H)
            dr = einsum("bnts,btnh->ntsh", ds, both)
            dk = einsum("bnts,nh->bsnh", ds, u) / np.sqrt(H)
            du, dv = (einsum(s, ds, x) / np.sqrt(H) for s, x in (
                ("bnts,bsnh->nh", self.k), ("bnts,ntsh->nh", self.r)
            ))  # fmt: skip
            dkernel = einsum("tsd,ntsh->dnh", self.waves, dr)
            return dq, oracle.grouped(dk, N // K), [du, dv, dkernel]
        dr = SCALE * einsum("bnts,btnh->ntsh", ds, self.q)
        table = np.zeros((N, 2 * FAR + 1, H))
        np.add.at(table, (slice(None), self.rows), dr)
        return dq, 0.0, [oracle.summed_to(table, self.args[0].shape)]


def problem(kind: str, T: int, S: int, dtype: Any = jnp.float32) -> tuple[list[Any], list[Any]]:
    """Return q, k, v and the score's arrays, and the cotangents of out and lse."""
    rng = np.random.default_rng(0)
    sizes = [(B, T, N, H), (B, S, K, H), (B, S, K, Hv)]
    args = [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]
    args += [jnp.asarray(0.3 * rng.normal(size=size), jnp.float32) for size in TABLES[kind]]
    cotangents = [rng.normal(size=(B, T, N, Hv)), rng.normal(size=(B, N, T))]
    return args, [jnp.asarray(x, t) for x, t in zip(cotangents, (dtype, jnp.float32), strict=True)]


def expected(kind: str, args: Any, cotangents: Any, i: Any, j: Any, **known: Any) -> list[Any]:
    """Compute out, lse, and the gradients of all args, in float64."""
    q, k, v, *arrays = args
    formula = Formula(kind, q, k, i, j, *arrays)
    known |= {"bias": formula.bias, "scale": SCALE}
    out, lse, _ = oracle.attention(q, k, v, **known)
    actual = oracle.attention_gradients(
        q, k, v, cotangent=cotangents[0], lse_cotangent=cotangents[1], **known
    )
    dq, dk, darrays = formula.gradients(actual.bias)
    return [out, lse, actual.q + dq, actual.k + dk, actual.v, *darrays]


def actual(kind: str, args: Any, cotangents: Any, given: Any = None, **call: Any) -> list[Any]:
    """Compute the same with the library. The arguments in `given` are traced."""

    @jax.jit
    def both(args: Any, given: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
            return dot_product_attention(
                q, k, v, scores=mods(kind, *arrays), scale=SCALE, return_residuals=True,
                **{**call, **(given or {})},
            )  # fmt: skip

        results, pull = jax.vjp(attend, *args)
        return [*results, *pull(tuple(cotangents))]

    return both(args, given)


def close(got: list[Any], want: list[Any], bound: float = 5e-6) -> None:
    errors = [error(a, b) for a, b in zip(got, want, strict=True)]
    assert max(errors) < bound, errors


@pytest.mark.sampled(0.03)
@pytest.mark.parametrize(
    ("kind", "kernel", "T", "masked", "dtype"),
    pairs(
        kind=KINDS, kernel=["reference", "blockwise", "decode"], T=[20, 600],
        masked=["causal", "lengths", "traced"], dtype=["float32", "bfloat16"],
    ),
)  # fmt: skip
def test_vector_scores_match_formula(
    kind: str, kernel: str, T: int, masked: str, dtype: str
) -> None:
    """In a tile, in stripes, or tile by tile if the mask is traced. With dropout."""
    if kernel == "decode":
        T = 20
    S, key = T + 20, jax.random.key(7)
    i, j = 20 + np.arange(T), np.arange(S)
    args, cotangents = problem(kind, T, S, jnp.dtype(dtype))
    lengths = np.array([S, S // 2])
    mask, allowed = (
        (masks.Causal(), j <= i[:, None]) if masked == "causal"
        else (masks.Lengths(lengths), j < lengths[:, None, None, None])
    )  # fmt: skip
    given = {"mask": mask} if masked == "traced" else {}
    got = actual(
        kind, args, cotangents, given, mask=mask, dropout_rng=key, dropout_rate=0.2,
        kernel=kernel, q_positions=20,
    )  # fmt: skip
    at = Scene((B,), T, S, "aligned")
    keep = jax.jit(WeightDropout.from_key(key, 0.2, False).keep)(at.row, at.head[None], at.i, at.j)
    known = {"allowed": allowed, "keep": np.asarray(keep), "rate": 0.2}
    # Queries are scaled in float32, after the matmul.
    bound = (5e-6 if T == 20 else 2e-5) if dtype == "float32" else 2e-2
    close(got, expected(kind, args, cotangents, i, j, **known), bound)


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_far_positions_are_exact(kernel: str) -> None:
    """Far positions and distances are as exact as near ones."""
    T = 64
    args, cotangents = problem("xl", T, T)
    # In float32 the angles of these positions would be off by more than the bound.
    i = np.stack([40_000 * np.arange(T) + 1_000_000, 3 * np.arange(T)])
    q_pos = jnp.asarray(i, jnp.int32)
    real = np.arange(T) < np.array([T, 40])[:, None]
    got = actual(
        "xl", args, cotangents, kernel=kernel,
        mask=masks.Causal() & masks.Keys(real), q_positions=q_pos, kv_positions=q_pos,
    )  # fmt: skip
    for row in range(B):
        a = i[row]
        allowed = (a <= a[:, None]) & real[row]
        want = expected("xl", args, cotangents, a, a, allowed=allowed)
        close([x[row] for x in got[:4]], [x[row] for x in want[:4]])


# Rows and heads sharded; heads only, so that groups share keys; queries too, by each strategy.
WAYS = {
    "heads": (meshes.changed(), "blockwise"),
    "ulysses": (meshes.FOUR, "all_gather:blockwise"),
    "ring": (meshes.EIGHT, "ring:blockwise"),
    "usp": ([("length", ("model", "data"))], "usp:blockwise"),
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", ["relative", "xl"])
@pytest.mark.parametrize("way", WAYS)
def test_vector_scores_on_meshes_match_formula(way: str, kind: str) -> None:
    T = 64
    i = np.arange(T)
    args, cotangents = problem(kind, T, T)
    want = expected(kind, args, cotangents, i, i, allowed=i <= i[:, None])
    rules, kernel = WAYS[way]
    with meshes.on("Auto", rules):
        close(actual(kind, args, cotangents, mask=masks.Causal(), kernel=kernel), want)


WRONG: list[tuple[Any, str]] = [
    (Relative(), "table must be an array, got NoneType"),
    (Relative(ones((4, H))), r"\[2·L \+ 1, H\] .* got \(4, 8\)"),
    (Relative(ones((3, 5))), r"H=8, got \(3, 5\)"),
    (TransformerXL(*[ones((N, H))] * 2, ones((3, N, H))), "even D, got"),
    (TransformerXL(*[ones((N, 2))] * 2, ones((4, N, H))), r"\(N, H\) = \(4, 8\)"),
    (Score(lambda s, b, h, i, j: s, vectors=True), "takes 5 positional arguments but 7"),
]  # fmt: skip


@pytest.mark.parametrize(("mod", "words"), WRONG)
def test_invalid_vector_scores_raise(mod: Any, words: str) -> None:
    args, _ = problem("relative", 3, 3)
    with pytest.raises((TypeError, ValueError), match=words):
        dot_product_attention(*args[:3], scores=(mod,))


@pytest.mark.slow
def test_memory_of_vector_scores_is_linear(optimized: None) -> None:
    """In the forward and backward pass, twice the tokens take twice the memory."""

    def peak(T: int) -> int:
        q = jax.ShapeDtypeStruct((1, T, 1, H), jnp.float32)
        arrays = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1, H), (1, H), (D, 1, H))]

        def loss(q: Any, *arrays: Any) -> Any:
            scores = (TransformerXL(*arrays), Relative(ones((33, H))))
            return dot_product_attention(q, q, q, scores=scores, kernel="blockwise").sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(q, *arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert peak(16384) < 1.5 * peak(8192) < 16384 * 8192
