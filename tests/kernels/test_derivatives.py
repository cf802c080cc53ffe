"""Derivatives of every mode and order by `checkpointed`, against float64 and on meshes.

All second derivatives of Σ cotangent·result along one direction are the same numbers: the
oracle's gradients, differentiated once more by central differences.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flax_mha import MultiHeadAttention, dot_product_attention, explain, kernels, sharding
from flax_mha.masks import Causal, Lengths
from tests import oracle
from tests.kernels import problems
from tests.kernels.cases import Case
from tests.kernels.scenes import MASKS, Scene
from tests.meshes import KINDS, changed, compare

# Mask, size, scores, heads, dropout, and whether the mask is known before tracing.
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
    """A call, the oracle's function of it, and a direction in its arrays."""

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
        """The oracle's out and lse, or its gradients, in float64."""
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
        """The derivative of `exact` along the direction."""
        x, t = (jax.tree.map(oracle.float64, tree) for tree in (self.x, self.t))

        def moved(step: float) -> Any:
            return self.exact(jax.tree.map(lambda a, b: a + step * b, x, t), gradients)

        ahead, behind = moved(EPSILON), moved(-EPSILON)
        return jax.tree.map(lambda a, b: (a - b) / (2 * EPSILON), ahead, behind)

    def attend(self, x: Any, mask: Any, kernel: str = "checkpointed") -> Any:
        """Out and lse, 0 where that is −∞."""
        mask = mask if self.traced else self.mask
        out, lse = dot_product_attention(
            *x["qkv"], mask=mask, kernel=kernel, return_residuals=True,
            **self.problem.call(x["learned"]),
        )  # fmt: skip
        return out, jnp.where(jnp.isneginf(lse), 0.0, lse)


def inner(one: Any, other: Any) -> jax.Array:
    """The sum of the products of two trees."""
    return sum(map(jnp.vdot, jax.tree.leaves(one), jax.tree.leaves(other)))


def assert_near(got: Any, want: Any, bound: float = 2e-5) -> None:
    """Relative to what is wanted, leaf by leaf."""
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
    """Each of the ways to the first derivatives, and to the second, in one program."""

    @jax.jit
    def run(x: Any, t: Any, mask: Any) -> Any:
        attend = functools.partial(posed.attend, mask=mask, **call)
        cotangents = posed.problem.cotangents
        return (
            {name: way(attend, x, t) for name, way in first.items()},
            {name: way(attend, cotangents, x, t) for name, way in second.items()},
        )

    return run(posed.x, posed.t, posed.mask)


@pytest.mark.parametrize("name", ["tiles from tables, dropout", "empty rows, sinks"])
def test_forward_mode(name: str) -> None:
    posed = Posed(*CALLS[name])
    found, _ = derivatives(posed, {"jvp": FIRST["jvp"]}, {})
    assert_near(found["jvp"], posed.along(gradients=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_first_and_second_derivatives(name: str) -> None:
    posed = Posed(*CALLS[name])
    first, second = derivatives(posed, FIRST, SECOND)
    for found, gradients in ((first, False), (second, True)):
        want = posed.along(gradients)
        for got in found.values():
            assert_near(got, want)


def test_auto_in_the_context_has_every_derivative() -> None:
    """Also of a function that JAX has traced before, and no longer thereafter."""
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 300, 2, 8)), jnp.float32)

    @jax.jit
    def loss(q: jax.Array) -> jax.Array:
        return (dot_product_attention(q, q, q, mask=Causal()) ** 2).sum()

    loss(q)
    with pytest.raises(TypeError, match="forward mode"):
        jax.jvp(loss, (q,), (q,))
    with kernels.any_derivative():
        slope = jax.jvp(loss, (q,), (q,))[1]
        assert explain(q, q, q).chosen == "checkpointed"
        assert explain(q[:, :100], q, q).chosen == "reference"
        told = explain(q, q, q, kernel="blockwise")
        assert told.chosen is None
        assert "not every derivative" in told.refused["blockwise"]
        with pytest.raises(ValueError, match=r"blockwise.*not every derivative"):
            dot_product_attention(q, q, q, kernel="blockwise")
    np.testing.assert_allclose(slope, jnp.vdot(jax.grad(loss)(q), q), rtol=1e-5)
    assert explain(q, q, q).chosen == "blockwise"
    with pytest.raises(TypeError, match="forward mode"):
        jax.jvp(loss, (q,), (q,))


def asked(loss: Any, q: jax.Array) -> dict[str, Any]:
    """Ways to ask for forward mode, by which JAX raises in different places."""
    directions = jnp.stack([q, q])
    return {
        "eager": lambda: jax.jvp(loss, (q,), (q,)),
        "compiled": lambda: jax.jit(lambda q: jax.jvp(loss, (q,), (q,)))(q),
        "linear": lambda: jax.linearize(loss, q)[1](q),
        "mapped": lambda: jax.vmap(lambda t: jax.jvp(loss, (q,), (t,))[1])(directions),
        "differentiated": lambda: jax.grad(lambda q: jax.jvp(loss, (q,), (q,))[1])(q),
        "twice": lambda: jax.jvp(lambda q: jax.jvp(loss, (q,), (q,))[1], (q,), (q,)),
    }


@pytest.mark.parametrize("kernel", ["blockwise", "decode"])
def test_other_kernels_name_the_one_that_can(kernel: str) -> None:
    q = jnp.ones((1, 8, 2, 8))

    def loss(q: jax.Array) -> jax.Array:
        return dot_product_attention(q, q, q, kernel=kernel).sum()

    for ask in asked(loss, q).values():
        with pytest.raises(TypeError, match=f"'checkpointed' .* forward mode .*'{kernel}'; name"):
            ask()
    if kernel == "decode":
        with pytest.raises(TypeError, match=r"'checkpointed' .* forward mode .*'decode'"):
            jax.jvp(jax.grad(loss), (q,), (q,))


@pytest.mark.parametrize("kernel", ["flex", "splash"])
def test_kernels_of_first_derivatives_say_so(tpu: None, kernel: str) -> None:
    q = jnp.ones((1, 128, 1, 8))

    def loss(q: jax.Array) -> jax.Array:
        return dot_product_attention(q, q, q, kernel=kernel).sum()

    with pytest.raises(TypeError, match=f"'checkpointed' .* forward mode .*'{kernel}'"):
        jax.eval_shape(lambda q: jax.vmap(lambda t: jax.jvp(loss, (q,), (t,))[1])(q[None]), q)
    for twice in (
        lambda q: jax.jvp(jax.grad(loss), (q,), (q,)),
        jax.grad(lambda q: jax.grad(loss)(q).sum()),
    ):
        with pytest.raises(TypeError, match=f"derivatives of derivatives, got '{kernel}'"):
            jax.eval_shape(twice, q)


def test_hidden_nan_and_empty_rows() -> None:
    """Neither reaches a tangent; that of an empty row is 0."""
    rng = np.random.default_rng(0)
    q, k, v, t = (jnp.asarray(rng.normal(size=(2, 20, 2, 8)), jnp.float32) for _ in range(4))
    lengths = jnp.array([13, 0])
    hidden = jnp.arange(20)[None, :, None, None] >= lengths[:, None, None, None]
    spoiled = (q, jnp.where(hidden, jnp.nan, k), jnp.where(hidden, jnp.inf, v))

    def attend(*qkv: jax.Array) -> jax.Array:
        return dot_product_attention(*qkv, mask=Lengths(lengths), kernel="checkpointed")

    @jax.jit
    def run(*qkv: jax.Array) -> Any:
        tangent = functools.partial(jax.jvp, attend, tangents=(t, t, t))
        # What is asked of an empty row must not meet its weights either.
        asked = jnp.ones_like(q).at[1].set(jnp.nan)
        second = jax.vjp(lambda *x: tangent(x)[1], *qkv)[1](asked)
        return *tangent(qkv), second

    out, tangent, second = run(*spoiled)
    for x in (out, tangent):
        np.testing.assert_array_equal(x[1], 0)
    clean = run(*(jnp.where(hidden, 0.0, x) if n else x for n, x in enumerate(spoiled)))
    assert_near((out, tangent, second), clean, 1e-6)
    for x in second:
        np.testing.assert_array_equal(x[1], 0)


def products(program: Any) -> int:
    """The multiplications of a program's matrix products, loops counted as often as they run."""
    total = 0
    for eqn in program.eqns:
        nodes = jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "jaxpr"))
        inside = [products(getattr(x, "jaxpr", x)) for x in nodes if hasattr(x, "eqns")]
        if eqn.primitive.name == "dot_general":
            ((axes, _), _), shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
            total += eqn.outvars[0].aval.size * np.prod([shape[a] for a in axes], dtype=int)
        elif eqn.primitive.name == "cond":
            # A tile that is passed over costs nothing.
            assert min(inside) == 0
            total += max(inside)
        else:
            total += sum(inside) * eqn.params.get("length", 1)
    return total


def test_excluded_tiles_are_skipped() -> None:
    """Of a causal mask nearly half, in forward mode and in reverse mode."""
    q = jax.ShapeDtypeStruct((1, 2048, 1, 64), jnp.float32)

    def count(mask: Any, differentiate: Any) -> int:
        def attend(q: jax.Array) -> jax.Array:
            return dot_product_attention(q, q, q, mask=mask, kernel="checkpointed").sum()

        return products(jax.make_jaxpr(lambda q: differentiate(attend, q))(q).jaxpr)

    for way in (lambda f, q: jax.jvp(f, (q,), (q,)), lambda f, q: jax.grad(f)(q)):
        assert 0.5 < count(Causal(), way) / count(None, way) < 0.7
    # What is not known is passed over where it runs, in a branch without products.
    assert count(Lengths(np.array([5])), lambda f, q: f(q)) < count(None, lambda f, q: f(q))


def temporaries(T: int, differentiate: Any, kernel: str = "checkpointed") -> int:
    """The bytes of them in the compiled program."""
    q = jax.ShapeDtypeStruct((1, T, 1, 64), jnp.float32)

    @jax.jit
    def run(q: jax.Array, lengths: jax.Array) -> Any:
        mask = Causal() & Lengths(lengths)

        def loss(q: jax.Array) -> jax.Array:
            return (dot_product_attention(q, q, q, mask=mask, kernel=kernel) ** 2).sum()

        return differentiate(loss, q)

    compiled = run.lower(q, jax.ShapeDtypeStruct((1,), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


WAYS = {
    "jvp": lambda f, q: jax.jvp(f, (q,), (q,))[1],
    "grad": lambda f, q: jax.grad(f)(q),
    "jvp of grad": lambda f, q: jax.jvp(jax.grad(f), (q,), (q,))[1],
    "grad of jvp": lambda f, q: jax.grad(lambda q: jax.jvp(f, (q,), (q,))[1])(q),
    "grad of grad": lambda f, q: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), q))(q),
}


@pytest.mark.parametrize(
    "way", ["jvp", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "jvp")]
)
def test_memory_is_linear_in_the_length(way: str) -> None:
    """Four times the tokens take at most four times the memory; of plain einsums sixteen."""
    short, long = (temporaries(T, WAYS[way]) for T in (1024, 4096))
    assert long < 4.2 * short
    # Less than one array of all scores.
    assert long < 4096**2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rules", ["heads", "tokens"])
def test_on_a_mesh(kind: str, rules: str) -> None:
    """Forward mode, and its gradient, as on one device."""
    by = sharding.RULES if rules == "heads" else changed(
        heads=None, kv_heads=None, length="model", batch="data"
    )  # fmt: skip
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=(4, 32, 8, 4)), jnp.float32) for _ in range(4)]

    def tangent(q: jax.Array, k: jax.Array, v: jax.Array, t: jax.Array) -> jax.Array:
        def attend(*qkv: jax.Array) -> jax.Array:
            return dot_product_attention(*qkv, mask=Causal(), kernel="checkpointed")

        return jax.jvp(attend, (q, k, v), (t, t, t))[1]

    compare(tangent, args, kind, by, [P("data")] * 4)


def test_a_ring_has_not_every_derivative() -> None:
    mesh = jax.make_mesh((1, 8), ("data", "model"))
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    rules = changed(heads=None, kv_heads=None, batch=None, length="model", mlp=None, vocab=None)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        assert explain(x, x, x).way == "ring"
        told = explain(x, x, x, kernel="checkpointed")
        assert (told.way, told.chosen) == ("all_gather", "checkpointed")
        with kernels.any_derivative():
            assert explain(x, x, x).way == "all_gather"
            assert "not every derivative" in explain(x, x, x, kernel="ring").refused["ring"]


@pytest.mark.slow
def test_a_layer_in_the_context() -> None:
    """Its Hessian-vector products are those of the reference kernel."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 300, 16)), jnp.float32)
    layer = MultiHeadAttention(2, mask=Causal())
    params = layer.init(jax.random.key(0), x)

    def product(layer: MultiHeadAttention) -> Any:
        def loss(params: Any) -> jax.Array:
            return (layer.apply(params, x) ** 2).sum()

        return jax.jvp(jax.grad(loss), (params,), (params,))[1]

    with kernels.any_derivative():
        got = product(layer)
    assert_near(got, product(layer.clone(kernel="reference")))
