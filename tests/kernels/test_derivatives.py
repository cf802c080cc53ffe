"""Derivatives of every mode and order by `checkpointed`, against float64 and on meshes.

Second derivatives of Σ cotangent·result along one direction are the same numbers in every mode:
the oracle's gradients, differentiated once more by central differences.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flax_mha import dot_product_attention, sharding
from flax_mha.masks import Causal, Lengths
from tests.kernels import problems
from tests.kernels.cases import Case
from tests.kernels.scenes import MASKS, Scene
from tests.support import oracle
from tests.support.meshes import KINDS, changed, compare

# Mask, size, scores, heads, dropout, and a static or traced mask.
CALLS = {
    "causal, several stripes": ("causal", "1x600x600", "plain", "gqa", "no_dropout", "known"),
    "tiles from tables, dropout": ("chosen", "2x100x300", "bias", "gqa", "dropout", "traced"),
    "empty rows, sinks": ("lengths", "2x65x66", "sinks", "dv", "no_dropout", "traced"),
    "all scores": ("mixed", "2x64x80", "all_scores", "mqa", "no_dropout", "known"),
    "heads with masks of their own": (
        "per_head", "2x100x80", "bias_of_heads", "mha", "dropout_broadcast", "known",
    ),
    "no mask": ("none", "2x30x300", "t5", "dv", "dropout", "known"),
}  # fmt: skip
EPSILON = 1e-5


class Posed:
    """A call with the oracle's function of it, and a direction in its arrays."""

    def __init__(self, mask: str, size: str, score: str, heads: str, dropout: str, given: str):
        *batch, T, S = (int(n) for n in size.split("x"))
        self.at = Scene(tuple(batch), T, S, "from_0", 5)
        self.mask, allowed = (None, None) if mask == "none" else MASKS[mask](self.at)
        self.allowed = None if allowed is None else self.at.table(allowed)
        case = Case(mask, size, score, "soft", heads, "float32", dropout, "from_0", given)
        self.problem = problems.pose(self.at, self.mask, self.allowed, case)
        self.traced, self.dropout = given == "traced", dropout
        self.capped = score in ("cap", "all_scores")
        self.x = {"qkv": self.problem.qkv, "learned": self.problem.learned}
        self.t = jax.tree.map(
            lambda x: jnp.asarray(self.at.rng.normal(size=x.shape), jnp.float32), self.x
        )

    def exact(self, x: Any, gradients: bool) -> Any:
        """Return the oracle's out and lse, or its gradients, in float64."""
        learned, known = x["learned"], dict[str, Any](allowed=self.allowed)
        known |= {"bias": problems.bias_of(self.at, learned), "sinks": learned.get("sinks")}
        known |= {"cap": problems.CAP} if self.capped else {}
        if self.dropout != "no_dropout":
            keep = problems.kept(self.at, self.dropout == "dropout_broadcast")
            known |= {"rate": problems.RATE, "keep": self.at.table(keep)}
        if not gradients:
            out, lse, _ = oracle.attention(*x["qkv"], **known)
            return out, np.where(np.isneginf(lse), 0.0, lse)
        dout, dlse = self.problem.cotangents
        found = oracle.attention_gradients(*x["qkv"], cotangent=dout, lse_cotangent=dlse, **known)
        rest = problems.learned_gradients(self.at, learned, found)
        return {"qkv": tuple(found[:3]), "learned": rest}

    def along(self, gradients: bool) -> Any:
        """Return the derivative of `exact` along the direction."""
        x, t = (jax.tree.map(oracle.float64, tree) for tree in (self.x, self.t))

        def moved(step: float) -> Any:
            return self.exact(jax.tree.map(lambda a, b: a + step * b, x, t), gradients)

        ahead, behind = moved(EPSILON), moved(-EPSILON)
        return jax.tree.map(lambda a, b: (a - b) / (2 * EPSILON), ahead, behind)

    def attend(self, x: Any, mask: Any, kernel: str = "checkpointed") -> Any:
        """Return out and lse, with 0 instead of −∞."""
        mask = mask if self.traced else self.mask
        out, lse = dot_product_attention(
            *x["qkv"], mask=mask, kernel=kernel, return_residuals=True,
            **self.problem.call(x["learned"]),
        )  # fmt: skip
        return out, jnp.where(jnp.isneginf(lse), 0.0, lse)


def inner(one: Any, other: Any) -> jax.Array:
    """Return the sum of the products of two trees."""
    return sum(map(jnp.vdot, jax.tree.leaves(one), jax.tree.leaves(other)))


def assert_near(got: Any, want: Any, bound: float = 2e-5) -> None:
    """Check the error relative to the expected leaves."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert oracle.error(one, other) < bound


FIRST = {
    "jvp": lambda f, x, t: jax.jvp(f, (x,), (t,))[1],
    "linearize": lambda f, x, t: jax.linearize(f, x)[1](t),
    "vmap": lambda f, x, t: jax.tree.map(
        lambda a: a[1] / 2,
        jax.vmap(lambda s: jax.jvp(f, (x,), (jax.tree.map(lambda a: s * a, t),))[1])(
            jnp.arange(1.0, 3)
        ),
    ),
    "remat": lambda f, x, t: jax.jvp(jax.checkpoint(f), (x,), (t,))[1],
}
SECOND = {
    "jvp of grad": lambda f, c, x, t: jax.jvp(lambda x: jax.vjp(f, x)[1](c)[0], (x,), (t,))[1],
    "grad of jvp": lambda f, c, x, t: jax.grad(
        lambda x: inner(c, jax.jvp(f, (x,), (t,))[1])
    )(x),
    "grad of grad": lambda f, c, x, t: jax.grad(
        lambda x: inner(t, jax.vjp(f, x)[1](c)[0])
    )(x),
    "remat, grad of jvp": lambda f, c, x, t: jax.grad(
        lambda x: inner(c, jax.jvp(jax.checkpoint(f), (x,), (t,))[1])
    )(x),
}  # fmt: skip


def derivatives(posed: Posed, first: Any, second: Any, **call: Any) -> tuple[Any, Any]:
    """Compute each of the first derivatives, and of the second, in one program."""

    @jax.jit
    def run(x: Any, t: Any, mask: Any) -> Any:
        attend = functools.partial(posed.attend, mask=mask, **call)
        cotangents = posed.problem.cotangents
        return (
            {name: way(attend, x, t) for name, way in first.items()},
            {name: way(attend, cotangents, x, t) for name, way in second.items()},
        )

    return run(posed.x, posed.t, posed.mask)


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("name", ["tiles from tables, dropout", "empty rows, sinks"])
def test_forward_mode_matches_differences(name: str) -> None:
    posed = Posed(*CALLS[name])
    found, _ = derivatives(posed, {"jvp": FIRST["jvp"]}, {})
    assert_near(found["jvp"], posed.along(gradients=False))


# Half of the ways on every other call, the other half on those between.
@pytest.mark.sampled(0)
@pytest.mark.parametrize(("name", "half"), [*zip(CALLS, itertools.cycle((0, 1)))])
def test_first_and_second_derivatives_match_differences(name: str, half: int) -> None:
    posed = Posed(*CALLS[name])
    ways = (dict([*ways.items()][half::2]) for ways in (FIRST, SECOND))
    first, second = derivatives(posed, *ways)
    for found, gradients in ((first, False), (second, True)):
        want = posed.along(gradients)
        for got in found.values():
            assert_near(got, want)


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("kernel", ["checkpointed", "reference"])
def test_huge_hidden_numbers_reach_no_tangent(kernel: str) -> None:
    """The tangent of a fully masked query is 0."""
    rng = np.random.default_rng(0)
    q, k, v, t = (jnp.asarray(rng.normal(size=(2, 20, 2, 8)), jnp.float32) for _ in range(4))
    lengths = jnp.array([13, 0])
    hidden = jnp.arange(20)[None, :, None, None] >= lengths[:, None, None, None]
    poisoned = (q, jnp.where(hidden, 3e38, k), jnp.where(hidden, -3e38, v))

    def attend(*qkv: jax.Array) -> jax.Array:
        return dot_product_attention(*qkv, mask=Lengths(lengths), kernel=kernel)

    @jax.jit
    def run(*qkv: jax.Array) -> Any:
        tangent = functools.partial(jax.jvp, attend, tangents=(t, t, t))
        # The cotangents of a fully masked query must not meet its weights either.
        asked = jnp.ones_like(q).at[1].set(jnp.nan)
        second = jax.vjp(lambda *x: tangent(x)[1], *qkv)[1](asked)
        return *tangent(qkv), second

    out, tangent, second = run(*poisoned)
    for x in (out, tangent):
        np.testing.assert_array_equal(x[1], 0)
    clean = run(*(jnp.where(hidden, 0.0, x) if n else x for n, x in enumerate(poisoned)))
    assert_near((out, tangent, second), clean, 1e-6)
    for x in second:
        np.testing.assert_array_equal(x[1], 0)


LOOPS: dict[str, Any] = {
    "map": jax.lax.map,
    "vmap": lambda f, x: jax.vmap(f)(x),
    "scan": lambda f, x: jax.lax.scan(lambda c, y: (c + f(c + y), f(y)), x[0], x)[0],
}
UNROLLED: dict[str, Any] = {
    "map": lambda f, x: jnp.stack([*map(f, x)]),
    "vmap": lambda f, x: jnp.stack([*map(f, x)]),
    "scan": lambda f, x: functools.reduce(lambda c, y: c + f(c + y), x, x[0]),
}


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kernel", ["checkpointed", "reference", "blockwise"])
def test_second_derivatives_in_a_loop_match_the_unrolled_form(kernel: str, loop: str) -> None:
    """Over several tiles. `blockwise` has derivatives of gradients."""
    rng = np.random.default_rng(0)
    x, t = (jnp.asarray(rng.normal(size=(2, 1, 600, 1, 4)), jnp.float32) for _ in range(2))

    def attend(x: jax.Array) -> jax.Array:
        return dot_product_attention(x, x, x, mask=Causal(), kernel=kernel)

    @jax.jit
    def second(x: jax.Array, t: jax.Array) -> list[Any]:
        found = []
        for run in (LOOPS[loop], UNROLLED[loop]):
            pull = jax.grad(lambda x, run=run: (jnp.sin(run(attend, x)) ** 2).sum())
            found.append(
                (
                    jax.jvp(pull, (x,), (t,))[1],
                    jax.grad(lambda x, pull=pull: jnp.vdot(pull(x), t))(x),
                )
            )
        return found

    got, want = second(x, t)
    assert_near(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["checkpointed", "reference"])
def test_third_derivatives_of_fully_masked_rows_are_zero(kernel: str) -> None:
    """The other rows' derivatives do not change."""
    rng = np.random.default_rng(0)
    q, t = (jnp.asarray(rng.normal(size=(2, 5, 1, 4)), jnp.float32) for _ in range(2))

    def third(q: jax.Array, t: jax.Array, lengths: jax.Array) -> jax.Array:
        def loss(q: jax.Array) -> jax.Array:
            return (dot_product_attention(q, q, q, mask=Lengths(lengths), kernel=kernel) ** 2).sum()

        def along(f: Any) -> Any:
            return lambda q: jax.jvp(f, (q,), (t,))[1]

        return along(along(jax.grad(loss)))(q)

    got = jax.jit(third)(q, t, jnp.array([4, 0]))
    np.testing.assert_array_equal(got[1], 0)
    assert oracle.error(got[:1], third(q[:1], t[:1], jnp.array([4]))) < 1e-5
    assert np.abs(got[0]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("over", ["heads", "ulysses", "all_gather"])
def test_forward_mode_on_mesh_matches_one_device(kind: str, over: str) -> None:
    """With its gradient."""
    tokens = changed(heads=None, kv_heads=None, length="model", batch="data")
    rules = sharding.RULES if over == "heads" else tokens
    kernel = "checkpointed" if over == "heads" else f"{over}:checkpointed"
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=(4, 32, 8, 4)), jnp.float32) for _ in range(4)]

    def tangent(q: jax.Array, k: jax.Array, v: jax.Array, t: jax.Array) -> jax.Array:
        def attend(*qkv: jax.Array) -> jax.Array:
            return dot_product_attention(*qkv, mask=Causal(), kernel=kernel)

        return jax.jvp(attend, (q, k, v), (t, t, t))[1]

    compare(tangent, args, kind, rules, [P("data")] * 4)
