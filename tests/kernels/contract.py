"""The promises of every kernel, as tests that the classes of `test_contract` inherit."""

import itertools
import os
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flax_mha import dot_product_attention, explain
from flax_mha.masks import Causal, Lengths
from tests.kernels import cases, problems
from tests.kernels.cases import Case
from tests.kernels.problems import Problem, problem_of
from tests.support import oracle
from tests.support.arrays import ones
from tests.support.draw import draw
from tests.support.programs import compiled

# Relative to the norm: what no kernel is asked to be better than. In half precision no gradient,
# though it be float32 as that of a bias, need be better than half a unit in the last place; in
# float16, where gradients of small weights have few digits left, than a unit.
FLOOR = 2e-6
GRADIENTS = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-10}
# Nor better than this part of its size before terms of both signs cancelled: where all weight is
# on one key, nothing but rounding is left of the gradients of q and k.
CANCELLED = 1e-6


def errors(problem: Problem, got: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the error of each result."""
    seen = np.isfinite(problem.truth["lse"])
    np.testing.assert_array_equal(np.isneginf(got["lse"]), ~seen)
    pairs = {name: (np.asarray(got[name]), want) for name, want in problem.truth.items()}
    pairs["lse"] = tuple(x[seen] for x in pairs["lse"])
    return {name: oracle.error(*pair) for name, pair in pairs.items()}


def excess(problem: Problem, got: dict[str, np.ndarray], as_cudnn: bool) -> dict[str, Any]:
    """Return the errors beyond their bounds, which are twice the errors of plain attention in the
    same dtype, or the floor. With `as_cudnn` they allow for the mean of a rounded output.
    """
    wrong = errors(problem, got)
    allowed = dict.fromkeys(wrong, FLOOR)
    least = GRADIENTS[problem.qkv[0].dtype.name]
    for name, size in problem.sizes.items():
        whole = float(np.linalg.norm(problem.truth[name])) or 1.0
        allowed[name] = max(least, CANCELLED * size / whole)
    # Most results need none of these, which take as long as the kernel.
    for plain in problem.plain(as_cudnn):
        if all(wrong[name] <= bound for name, bound in allowed.items()):
            return {}
        for name, error in errors(problem, plain).items():
            allowed[name] = max(allowed[name], 2 * error)
    return {x: (wrong[x], allowed[x]) for x in wrong if not wrong[x] <= allowed[x]}


def drawn(config: pytest.Config, name: str, rows: list[Case], count: float) -> list[Any]:
    """Return the cases of today's ordinary run, that many, and as slow ones those of a slow run.

    The thousands of other cases are not collected, unless the command names a test or `grid`.
    """
    if any("::" in x for x in config.args):
        return rows
    seed = int(os.environ["TEST_DRAW"])
    fast, more = draw(rows, min(1, count / len(rows)), seed, name)
    if "grid" in config.option.markexpr:
        more = [row for row in rows if row not in fast]
    return [*fast, *(pytest.param(row, marks=pytest.mark.slow(1)) for row in more)]


def one(fn: Any) -> Any:
    """Return the function on arrays with a leading axis of one."""
    return lambda *x: jax.tree.map(lambda y: y[None], fn(*jax.tree.map(lambda y: y[0], x)))


def sharded(fn: Any, check_vma: bool = True) -> Any:
    mesh = jax.make_mesh((2,), ("copies",), (AxisType.Auto,), devices=jax.devices()[:2])
    at = P("copies")
    return jax.shard_map(one(fn), mesh=mesh, in_specs=at, out_specs=at, check_vma=check_vma)


# How a function of arrays is called for each entry of their leading axis.
WAYS: dict[str, Any] = {
    "jit": one,
    "remat": lambda fn: one(jax.checkpoint(fn)),
    "vmap": jax.vmap,
    "scan": lambda fn: lambda *x: jax.lax.map(lambda y: fn(*y), x),
    "shard_map": sharded,
    "x64": one,
}
# The derivative of Σ c·f(x) along t, once differentiated more, and the derivative of f.
DERIVATIVES: dict[str, Any] = {
    "jvp": lambda f, c, x, t: jax.jvp(f, (x,), (t,))[1],
    "jvp of grad": lambda f, c, x, t: jax.jvp(lambda x: jax.vjp(f, x)[1](c)[0], (x,), (t,))[1],
    "grad of jvp": lambda f, c, x, t: jax.grad(lambda x: dot(c, jax.jvp(f, (x,), (t,))[1]))(x),
    "grad of grad": lambda f, c, x, t: jax.grad(lambda x: dot(t, jax.vjp(f, x)[1](c)[0]))(x),
}
EVERY = (*DERIVATIVES,)


def value_and_pullback(fn: Any) -> Any:
    """Return a function of primals and cotangents to results and gradients, in one program."""

    @jax.jit
    def run(primals: Any, cotangents: Any) -> Any:
        results, pull = jax.vjp(fn, *primals)
        return results, pull(cotangents)

    return run


def dot(one: Any, other: Any) -> jax.Array:
    """Return the sum of the products of two trees."""
    return sum(map(jnp.vdot, jax.tree.leaves(one), jax.tree.leaves(other)))


ARGUMENTS = ("q", "k", "v", "bias", "sinks")
# Of any two both are mapped, either alone, and neither.
MAPPED = [
    tuple(itertools.compress(ARGUMENTS, row))
    for row in cases.pairs(**dict.fromkeys(ARGUMENTS, (0, 1)))
]
# The case of every run: partial tiles, a band next to the diagonal, and sums of groups.
ALWAYS = Case(
    "window", "2x65x129", "sinks", "soft", "gqa", "float32", "dropout", "aligned", "known"
)
# Mask, size, score, heads, dropout, and a static or traced mask, for several tiles.
DERIVED = {
    "causal": ("causal", "1x600x600", "plain", "gqa", "no_dropout", "known"),
    "empty rows, sinks": ("lengths", "2x65x66", "sinks", "dv", "no_dropout", "known"),
    "all scores": ("mixed", "2x64x80", "all_scores", "mqa", "no_dropout", "known"),
    "no mask": ("none", "2x30x300", "t5", "dv", "dropout", "known"),
    "masks of heads": (
        "per_head",
        "2x100x80",
        "bias_of_heads",
        "mha",
        "dropout_broadcast",
        "known",
    ),
    "lengths": ("lengths", "2x65x66", "plain", "gqa", "no_dropout", "traced"),
    "tables of tiles": ("chosen", "2x100x300", "bias", "gqa", "dropout", "traced"),
}


class KernelContract:
    """Tests of one kernel. A subclass is a row: the kernel, its platform, and its claims.

    Attributes:
      kernel: the kernel's name.
      platform: the fixture that stands in for its platform; None if it runs here.
      native: JAX's name of a platform on which nothing stands in.
      dtype: a dtype that it takes.
      ways: the ways to call it, of `WAYS`; the others of a case run as "jit".
      derivatives: the derivatives that it has beyond a gradient, of `DERIVATIVES`.
      under_traced: these under masks of traced arrays, if they are fewer.
      hidden: the largest masked number that it takes: its products with cotangents are finite.
      takes_scores: False if it refuses a bias of keys.
      instead: values of a case that the kernel refuses or that take too long, and what it gets.
      daily: how many cases an ordinary run has.
    """

    kernel: ClassVar[str]
    platform: ClassVar[str | None] = None
    native: ClassVar[str | None] = None
    dtype: ClassVar[str] = "float32"
    ways: ClassVar[tuple[str, ...]] = (*WAYS,)
    derivatives: ClassVar[tuple[str, ...]] = ()
    under_traced: ClassVar[tuple[str, ...] | None] = None
    hidden: ClassVar[float] = 3e38
    takes_scores: ClassVar[bool] = True
    instead: ClassVar[dict[str, str]] = {}
    daily: ClassVar[float] = 1

    @classmethod
    def stands_in(cls) -> str | None:
        """Return the fixture that stands in for the kernel's platform, or None if it is here."""
        return None if jax.default_backend() == cls.native else cls.platform

    @pytest.fixture(autouse=True)
    def device(self, request: pytest.FixtureRequest) -> None:
        if fixture := self.stands_in():
            request.getfixturevalue(fixture)

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Draw cases. The rows for triples are for kernels that run here as they are."""
        if "case" in metafunc.fixturenames:
            rows = [*cases.ordinary(), *([] if cls.platform else cases.grid())]
            metafunc.parametrize(
                "case", drawn(metafunc.config, cls.__name__, rows, cls.daily), ids=str
            )

    def attend(self, *qkv: Any, **call: Any) -> Any:
        """Return the output and the lse."""
        return dot_product_attention(*qkv, kernel=self.kernel, return_residuals=True, **call)

    def skip_refused(self, *qkv: Any, **call: Any) -> None:
        if reason := explain(*qkv, kernel=self.kernel, **call).refused.get(self.kernel):
            pytest.skip(f"{self.kernel} refuses: {reason}")

    def pose(self, case: Case) -> Problem:
        """Return the problem, or skip the test if the kernel refuses it."""
        problem = problem_of(case)
        traced = case.given == "traced"

        def ask(given: Any) -> None:
            given, call = given if traced else problem.given, problem.call(problem.learned)
            self.skip_refused(*problem.qkv, **named(given), **call)

        with jax.enable_x64(case.way == "x64"):
            jax.eval_shape(ask, problem.given if traced else None)
        return problem

    def pulled(self, problem: Problem, traced: bool, way: str) -> Any:
        """Return a function of queries, keys and values that computes all results by name.

        For some ways there are two copies of the call. In the second q, k, v and the cotangent of
        the output are negated, and so are the output and the gradients of q, k and v.
        """
        signs = np.array([1, -1][: 2 if way in ("vmap", "scan", "shard_map") else 1])

        def copied(tree: Any, signed: bool = False) -> Any:
            return jax.tree.map(
                lambda x: np.stack([-x if signed and sign < 0 else x for sign in signs]),
                jax.device_get(tree),
            )

        @jax.jit
        def run(qkv: Any, learned: Any, given: Any, cotangents: Any) -> Any:
            def attend(qkv: Any, learned: Any, given: Any = problem.given) -> Any:
                return self.attend(*qkv, **named(given), **problem.call(learned))

            def called(qkv: Any, learned: Any) -> Any:
                # Pallas needs the check off.
                off = {"check_vma": False} if self.platform and way == "shard_map" else {}
                return WAYS[way](attend, **off)(qkv, learned, *given)

            (out, lse), pull = jax.vjp(called, qkv, learned)
            dqkv, dlearned = pull(cotangents)
            return {"out": out, "lse": lse, **dict(zip("qkv", dqkv, strict=True)), **dlearned}

        dout, dlse = problem.cotangents
        rest = (
            copied(problem.learned), (copied(problem.given),) if traced else (),
            (copied(dout, signed=True), copied(dlse)),
        )  # fmt: skip

        def results(*qkv: jax.Array) -> list[dict[str, np.ndarray]]:
            found = jax.device_get(run(copied(qkv, signed=True), *rest))
            return [
                {
                    name: -x[n] if n and name in ("out", *"qkv") else x[n]
                    for name, x in found.items()
                }
                for n in range(len(signs))
            ]

        return results

    def test_numbers_and_laws(self, case: Case) -> None:
        """With dropout, numbers are the oracle's only if all bits are those of their positions."""
        case = Case(*(self.instead.get(value, value) for value in case))
        case = case._replace(way=case.way if case.way in self.ways else "jit")
        self.check(self.pose(case), case.given == "traced", case.way)

    def check(self, problem: Problem, traced: bool, way: str = "jit") -> None:
        """Check that numbers are right, masked ones have no effect, and NaN stays in its group."""
        with jax.enable_x64(way == "x64"):
            run, (q, k, v) = self.pulled(problem, traced, way), map(np.asarray, problem.qkv)
            clean = run(q, k, v)
            self.check_numbers(problem, clean)
            seen_q, seen_k = seen(problem)
            most = np.asarray(min(self.hidden, float(jnp.finfo(q.dtype).max)), q.dtype)
            hidden = run(
                np.where(seen_q, q, most), np.where(seen_k, k, most), np.where(seen_k, v, -most)
            )
            bad = run(*map(spoiled, (q, k, v)))
            for n, want in enumerate(clean):
                for name, x in want.items():
                    np.testing.assert_array_equal(hidden[n][name], x, f"masked numbers: {name}")
                    if name in ("out", "lse", *"qkv"):
                        pair = (of_others(name, y, k.shape[-2]) for y in (bad[n][name], x))
                        np.testing.assert_array_equal(*pair, f"NaN elsewhere: {name}")

    def check_numbers(self, problem: Problem, found: list[dict[str, np.ndarray]]) -> None:
        seen_q, seen_k = seen(problem)
        for got in found:
            assert got["out"].dtype == problem.qkv[0].dtype
            assert got["lse"].dtype == jnp.float32
            beyond = excess(problem, got, self.kernel.endswith(("cudnn", "splash")))
            assert not beyond, f"errors beyond their bounds: {beyond}"
            for name, where in (("out", seen_q), ("q", seen_q), ("k", seen_k), ("v", seen_k)):
                x = got[name]
                np.testing.assert_array_equal(np.where(where, 0, x), 0, err_msg=name)

    def test_numbers_and_laws_of_one_call(self) -> None:
        """Run the same case every day."""
        self.test_numbers_and_laws(ALWAYS)

    @pytest.mark.sampled(0.007)
    @pytest.mark.parametrize("order", DERIVATIVES)
    @pytest.mark.parametrize("name", DERIVED)
    def test_derivatives_in_a_loop(self, name: str, order: str) -> None:
        """They match differences, or the kernel does not claim them and raises an error."""
        mask, size, score, heads, dropout, given = DERIVED[name]
        case = Case(mask, size, score, "soft", heads, self.dtype, dropout, "from_0", given)
        problem, traced, rng = self.pose(case), given == "traced", np.random.default_rng(0)
        claimed = self.derivatives
        if traced and self.under_traced is not None:
            claimed = self.under_traced
        x = {"qkv": problem.qkv, "learned": problem.learned}
        t = jax.tree.map(lambda y: jnp.asarray(rng.normal(size=y.shape), y.dtype), x)

        @jax.jit
        def run(x: Any, t: Any, given: Any) -> Any:
            def attend(size: jax.Array, x: Any) -> Any:
                x = jax.tree.map(lambda y: size.astype(y.dtype) * y, x)
                call = named(given or problem.given) | problem.call(x["learned"])
                out, lse = self.attend(*x["qkv"], **call)
                return out, jnp.where(jnp.isneginf(lse), 0.0, lse)

            def last(x: Any) -> Any:
                found = jax.lax.map(lambda size: attend(size, x), jnp.array([0.5, 1.0]))
                return jax.tree.map(lambda y: y[1], found)

            return DERIVATIVES[order](last, problem.cotangents, x, t)

        try:
            got = run(x, t, problem.given if traced else None)
        except (TypeError, ValueError, NotImplementedError):
            if order in claimed:
                raise
            return
        want = problems.derivative(problem, x, t, of_gradients=order != "jvp")
        bound = 2e-5 if self.dtype == "float32" else 0.05
        for ours, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert oracle.error(ours, exact) < bound

    @pytest.mark.sampled(0.012)
    @pytest.mark.parametrize("mapped", MAPPED, ids="_".join)
    def test_vmap_over_some_arguments(self, mapped: tuple[str, ...]) -> None:
        """The others are shared."""
        rng, shape = np.random.default_rng(2), (2, 30, 4, 8)
        sizes = dict.fromkeys((*"qkv", "dout"), shape) | {"bias": (4, 1, 30), "sinks": (4,)}
        mapped = (*mapped, "dout")
        x = {
            name: jnp.asarray(rng.normal(size=(2, *size) if name in mapped else size), self.dtype)
            for name, size in sizes.items() if self.takes_scores or len(size) == 4
        }  # fmt: skip
        axes = {name: 0 if name in mapped else None for name in x}

        @jax.jit
        def run(x: dict[str, jax.Array]) -> Any:
            rest = {name: y for name, y in x.items() if name != "dout"}

            def attend(rest: dict[str, jax.Array]) -> jax.Array:
                more = {name: rest[name] for name in ("bias", "sinks") if name in rest}
                return self.attend(*(rest[name] for name in "qkv"), mask=Causal(), **more)[0]

            out, pull = jax.vjp(attend, rest)
            return out, pull(x["dout"])

        each = [run({n: y if axes[n] is None else y[r] for n, y in x.items()}) for r in range(2)]
        got = jax.jit(jax.vmap(run, (axes,)))(x)
        for ours, *alone in zip(*map(jax.tree.leaves, (got, *each)), strict=True):
            bound = 1e-5 if self.dtype == "float32" else 0.02
            assert oracle.error(ours, np.stack(alone)) < bound

    @pytest.mark.sampled(0.03)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("limited", [False, True])
    def test_scores_of_ten_thousand(self, dtype: str, limited: bool) -> None:
        """The inputs are integers, which no dtype rounds, so results are as exact as elsewhere."""
        B, T, S, N, K, H, rng = 2, 150, 280, 4, 2, 8, np.random.default_rng(5)
        q, k = rng.integers(-80, 81, (B, T, N, H)), rng.integers(-80, 81, (B, S, K, H))
        # Pairs of keys with scores at most 1 apart, and very different gradients.
        k[:, 1::2, :, :-2] = k[:, ::2, :, :-2]
        k[:, 1::2, :, 0] += 1
        q[..., 0], q[..., -2:] = rng.integers(-1, 2, (B, T, N)), 0
        v, dout = rng.normal(size=k.shape), rng.normal(size=q.shape)
        *qkv, dout = (jnp.asarray(x, dtype) for x in (q, k, v, dout))
        known: dict[str, Any] = {"scale": 1.0}
        call = dict(known)
        if limited:
            known |= {"allowed": np.tri(T, S, dtype=bool)}
            known |= {"sinks": np.array([1e4, -1e4, 5e3, 0.0], np.float32)}
            call |= {"mask": Causal(), "sinks": known["sinks"]}
        self.skip_refused(*qkv, **call)
        cotangents = dout, np.zeros((B, N, T), np.float32)
        (out, lse), gradients = value_and_pullback(lambda *x: self.attend(*x, **call))(
            qkv, cotangents
        )
        want, want_lse, wanted = problems.exact(*qkv, **known, cotangent=dout)
        assert np.abs(want_lse).max() > 1e4
        np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
        eps = float(jnp.finfo(dtype).eps)
        assert oracle.error(out, want) < max(FLOOR, eps)
        for got, exact in zip(gradients, wanted, strict=False):
            assert oracle.error(got, exact) < max(1e-5, 4 * eps)

    @pytest.mark.sampled(0.06)
    @pytest.mark.parametrize("sizes", [(0, 0), (0, 3), (3, 0), (0, 300), (300, 0)], ids=str)
    def test_no_queries_or_no_keys(self, sizes: tuple[int, int]) -> None:
        """The output and the gradients are 0, and the lse is that of the sinks."""
        T, S = sizes
        qkv = [ones((2, n, heads, 8), self.dtype) for n, heads in ((T, 4), (S, 2), (S, 2))]
        cotangents = ones((2, T, 4, 8), self.dtype), ones((2, 4, T))
        for call in ({"mask": Causal()}, {"sinks": problems.SINKS}):
            self.skip_refused(*qkv, **call)
            (out, lse), gradients = value_and_pullback(
                lambda *x, call=call: self.attend(*x, **call)
            )(qkv, cotangents)
            assert out.shape == (2, T, 4, 8)
            for x in (out, *gradients):
                np.testing.assert_array_equal(x, 0)
            lse_of_none = call.get("sinks", np.full(4, -np.inf))
            np.testing.assert_array_equal(lse, np.broadcast_to(lse_of_none[:, None], lse.shape))

    @pytest.mark.sampled(0.2)
    @pytest.mark.parametrize("keys", [1, 4])
    def test_queries_whose_keys_are_all_hidden(self, keys: int) -> None:
        """By a mask, or by infinite biases. XLA's kernels also drop NaN cotangents of such queries,
        which a division of the output by its norm gives. XLA drops the start of a reduction over
        one entry (JAX 0.12.0.1, findings/reduction_of_one_entry_drops_its_start.sh).
        """
        rng = np.random.default_rng(1)
        q, k, v, dout = (
            rng.normal(size=(2, n, 4, 8)).astype(jnp.dtype(self.dtype)) for n in (4, keys, keys, 4)
        )
        bias = np.zeros((4, keys), q.dtype)
        bias[1] = -np.inf
        mask = np.broadcast_to(np.arange(4)[:, None] > 0, (4, keys))
        self.skip_refused(q, k, v, mask=mask, bias=bias)
        if not self.platform:
            dout[:, 0] = np.nan
        (out, lse), gradients = value_and_pullback(
            lambda *x: self.attend(*x[:3], mask=mask, bias=x[3])
        )((q, k, v, bias), (dout, ones((2, 4, 4))))
        np.testing.assert_array_equal(out[:, :2], 0)
        np.testing.assert_array_equal(np.isneginf(lse).all((0, 1)), np.arange(4) < 2)
        assert np.all(out[:, 2:] != 0)
        for x in gradients:
            assert np.isfinite(np.asarray(x, np.float32)).all()
        for hidden in (gradients[0][:, :2], gradients[3][:2]):
            np.testing.assert_array_equal(hidden, 0)

    @pytest.mark.sampled(0.06)
    def test_a_second_eager_call_compiles_nothing(self) -> None:
        """Nor does its gradient. The other values of the same shapes count."""

        def call(seed: int) -> None:
            rng = np.random.default_rng(seed)
            q, k, v = (jnp.asarray(rng.normal(size=(2, 40, 4, 8)), self.dtype) for _ in range(3))
            lengths = rng.integers(1, 9, 2)
            mask = Causal() & Lengths(jnp.asarray(lengths))
            results, pull = jax.vjp(lambda *x: self.attend(*x, mask=mask), q, k, v)
            jax.block_until_ready(pull(results))
            allowed = np.tri(40, dtype=bool) & (np.arange(40) < lengths[:, None, None, None])
            want, *_ = oracle.attention(q, k, v, allowed=allowed)
            assert oracle.error(results[0], want) < max(FLOOR, float(jnp.finfo(self.dtype).eps))

        if self.stands_in() not in (None, "nvidia"):
            pytest.skip("Interpreters compile a kernel in each call.")
        call(0)
        with compiled() as programs:
            call(1)
        assert not programs


def named(given: Any) -> dict[str, Any]:
    return dict(zip(("mask", "q_positions", "kv_positions"), given, strict=True))


def seen(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Return whether a query sees a key [*B, T, N, 1], and a key is seen [*B, S, K, 1]."""
    allowed = problem.known["allowed"]
    if allowed is None:
        return np.array(True), np.array(True)
    *B, S, K, _ = problem.qkv[1].shape
    keys = allowed.any(-2).reshape(*B, K, -1, S).any(-2)
    return tuple(np.swapaxes(x, -1, -2)[..., None] for x in (allowed.any(-1), keys))


def spoiled(x: np.ndarray) -> np.ndarray:
    """Return the array with NaN in the first head of a token of the first row."""
    rows = x.copy().reshape(-1, *x.shape[-3:])
    rows[0, rows.shape[1] // 2, 0] = np.nan
    return rows.reshape(x.shape)


def of_others(name: str, x: np.ndarray, groups: int) -> np.ndarray:
    """Return the numbers of all rows and groups but the first row's first group."""
    x = x[..., None] if name == "lse" else np.swapaxes(x, -3, -2)
    *_, heads, length, features = x.shape
    return x.reshape(-1, heads // groups * length * features)[1:]
