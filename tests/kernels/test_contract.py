"""Every kernel: its row of the contract, and the claims that only it has."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flax_mha import dot_product_attention
from flax_mha.kernels import KERNELS
from flax_mha.masks import Causal, Window
from tests.kernels import cases
from tests.kernels.cases import Case
from tests.kernels.contract import EVERY, KernelContract
from tests.kernels.problems import Problem, exact, pose, problem_of
from tests.masks.catalogue import MASKS, Scene
from tests.support import oracle, plain_attention
from tests.support.algebra import Expression, Meant, evaluate, expressions


class TestReference(KernelContract):
    kernel, derivatives = "reference", EVERY

    @pytest.mark.usefixtures("tpu")
    @pytest.mark.parametrize(("T", "dtype"), [(1, "float32"), (5, "bfloat16")])
    def test_few_queries_on_tpus_match_oracle(self, T: int, dtype: str) -> None:
        """Their products have eight rows there."""
        rng = np.random.default_rng(T)
        q, dout, *kv = (
            jnp.asarray(rng.normal(size=(n, 2, 8)), dtype).astype(jnp.float32) for n in (T, T, 9, 9)
        )
        allowed = rng.random((T, 9)) < 0.6

        def attend(*qkv: jax.Array) -> jax.Array:
            return self.attend(*(x.astype(dtype) for x in qkv), mask=allowed)[0]

        out, pull = jax.vjp(jax.jit(attend), q, *kv)
        want, _, gradients = exact(q, *kv, allowed=allowed, cotangent=dout)
        bound = 1e-5 if dtype == "float32" else 2**-7
        for got, one in zip((out, *pull(dout.astype(dtype))), (want, *gradients), strict=False):
            assert oracle.error(got, one) < bound


class TestCheckpointed(KernelContract):
    kernel, derivatives = "checkpointed", EVERY


class TestBlockwise(KernelContract):
    kernel, derivatives = "blockwise", ("jvp of grad", "grad of grad")
    under_traced = ("jvp of grad",)

    @pytest.mark.slow
    @settings(max_examples=12, deadline=None)
    @given(
        st.integers(2, 5), st.integers(1, 700), st.sampled_from([(4, 4), (4, 2), (3, 1)]),
        st.sampled_from(["float32", "bfloat16"]), st.booleans(),
    )  # fmt: skip
    def test_a_row_has_the_bits_that_it_has_alone(
        self, B: int, T: int, heads: tuple[int, int], dtype: str, is_causal: bool
    ) -> None:
        """Output and gradients."""
        N, K = heads
        rng = np.random.default_rng(T)
        q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, 16)), dtype) for n in (N, K, K))

        @jax.jit
        def both(*qkv: jax.Array) -> Any:
            mask = Causal() if is_causal else None
            out, pull = jax.vjp(lambda *x: self.attend(*x, mask=mask)[0], *qkv)
            return out, *pull(out)

        last = both(*(x[-1:] for x in (q, k, v)))
        for together, alone in zip(both(q, k, v), last, strict=True):
            np.testing.assert_array_equal(together[-1:], alone)

    @pytest.mark.slow
    @pytest.mark.usefixtures("optimized")
    @pytest.mark.parametrize("left", [None, 300])
    def test_long_sequences_match_oracle(self, left: int | None) -> None:
        """Some queries at T = 32,768, and the gradients that they reach."""
        rng, T = np.random.default_rng(7), 32768
        q, k, v = (jnp.asarray(rng.normal(size=(T, 1, 8)), jnp.float32) for _ in range(3))
        some = np.array([0, 1, 255, 256, 511, 512, 20_000, T - 1])
        rows = jnp.asarray(rng.normal(size=(len(some), 1, 8)), jnp.float32)
        mask, allowed = Causal(), np.arange(T) <= some[:, None]
        if left:
            mask, allowed = mask & Window(left), allowed & (np.arange(T) >= some[:, None] - left)
        out, pull = jax.vjp(jax.jit(lambda *x: self.attend(*x, mask=mask)[0]), q, k, v)
        dq, dk, dv = pull(jnp.zeros_like(q).at[some].set(rows))
        known = {"allowed": allowed, "cotangent": rows}
        want, _, gradients = exact(q[some], k, v, **known)
        assert oracle.error(out[some], want) < 2e-6
        for got, one in zip((dq[some], dk, dv), gradients, strict=False):
            assert oracle.error(got, one) < 1e-5
        np.testing.assert_array_equal(jnp.delete(dq, some, axis=0), 0)

    @pytest.mark.sampled(0.08)
    def test_memory_is_linear_in_length(self) -> None:
        """At T = 32,768 the scores of a head would need 4 GiB."""
        x = jax.ShapeDtypeStruct((32768, 1, 8), jnp.float32)

        def loss(*qkv: jax.Array) -> jax.Array:
            return self.attend(*qkv, mask=Causal())[0].sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20


class TestDecode(KernelContract):
    kernel = "decode"
    instead: ClassVar = {
        "2x129x129": "2x29x129", "2x257x257": "2x17x257", "1x600x600": "1x9x600",
        "2x257x129": "2x57x129", "2x100x300": "2x60x300", "x300x7": "x30x7", "2x65x129": "2x9x129",
    }  # fmt: skip


class TestShort(KernelContract):
    kernel, platform, daily = "short", "tpu", 0.5
    instead: ClassVar = {"float16": "bfloat16"}


class TestFlex(KernelContract):
    kernel, platform, daily = "flex", "tpu", 0.5
    instead: ClassVar = {"float16": "bfloat16"}


class TestSplash(KernelContract):
    kernel, platform, hidden, takes_scores = "splash", "tpu", 1e18, False
    daily, ways = 0.5, ("jit", "remat", "vmap", "scan", "shard_map")
    # It gets queries that are scaled and rounded, so half precision needs a scale that is exact.
    instead: ClassVar = {
        "float16": "float32", "default": "number",
        **dict.fromkeys(("dropout", "dropout_broadcast"), "no_dropout"),
        **dict.fromkeys(("bias", "bias_of_keys", "sinks", "alibi", "user"), "plain"),
        **dict.fromkeys(("bias_of_rows", "bias_of_heads", "t5", "all_scores"), "cap"),
    }  # fmt: skip
    test_scores_of_ten_thousand = None  # Its gradients are computed from a float32 lse.

    def attend(self, *qkv: Any, **call: Any) -> Any:
        """Return the output, and the lse of another kernel."""
        out = dot_product_attention(*qkv, kernel="splash", **call)
        lse = dot_product_attention(*qkv, kernel="reference", return_residuals=True, **call)[1]
        return out, lse


class TestCudnn(KernelContract):
    kernel, platform, native = "cudnn", "nvidia", "gpu"
    dtype, hidden, takes_scores = "bfloat16", 5e5, False
    # It takes biases of each pair only, for which test_cudnn.py has cases.
    instead: ClassVar = {
        "float32": "bfloat16", **dict.fromkeys(("dropout", "dropout_broadcast"), "no_dropout"),
        **dict.fromkeys(("bias", "bias_of_keys", "cap", "alibi"), "plain"),
        **dict.fromkeys(("bias_of_rows", "bias_of_heads", "t5", "user", "all_scores"), "sinks"),
    }  # fmt: skip

    def pose(self, case: Case) -> Problem:
        """Hide larger numbers where no bias of −2⁴² hides them."""
        is_native = case.mask in ("none", "causal", "lengths", "length")
        self.hidden = 1e9 if is_native and case.place != "scattered" else 5e5
        return super().pose(case)


# Too long for the fast tests, which have a case of their own for it.
@pytest.mark.slow
class TestFlexOnHopper(KernelContract):
    kernel, platform, native = "flex", "hopper_memory", "gpu"
    dtype, ways = "bfloat16", ("jit",)
    # The interpreter for Hopper calls Python for each access to memory, so that its time grows with
    # rows and tiles. It gets fewer tiles: still several, full, partial and empty ones.
    instead: ClassVar = {
        "float32": "bfloat16", "t5": "alibi", "all_scores": "cap",
        "2x257x257": "2x129x257", "1x600x600": "1x129x257",
    }  # fmt: skip


def test_every_kernel_has_a_row() -> None:
    assert {row.kernel for row in KernelContract.__subclasses__()} == {*KERNELS}


SMALL = ("packed", "2x8x8", "all_scores", "soft", "gqa", "float32")


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize(
    ("kernel", "row", "case"),
    [
        *((x, TestBlockwise, SMALL) for x in ("ring:blockwise", "ulysses", "all_gather")),
        ("ring:reference", TestReference, SMALL),
        ("ring:flex", TestFlex, ("packed", "2x256x256", "t5", "soft", "gqa", "float32")),
        *(("ring:cudnn", TestCudnn, (mask, "2x64x64", "sinks", "soft", "gqa", "bfloat16"))
          for mask in ("none", "causal", "window")),
    ],
)  # fmt: skip
def test_strategies_keep_the_laws(
    kernel: str, row: type[KernelContract], case: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    if row.platform:
        request.getfixturevalue(row.platform)
    request.getfixturevalue("tokens_on_devices")
    test = row()
    test.kernel = kernel  # type: ignore[misc]
    test.check(problem_of(Case(*case, "no_dropout", "from_0", "known")), traced=False)


# Each example compiles: shrinking one would take minutes.
@pytest.mark.slow
@settings(max_examples=8, phases=[Phase.generate])
@given(
    expressions(MASKS),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from(["from_0", "aligned", "scattered"]),
    st.sampled_from(["known", "traced"]),
    st.sampled_from(["plain", "all_scores"]),
    st.integers(0, 2**32 - 1),
)
def test_random_masks(
    expression: Expression, T: int, S: int, place: str, given: str, score: str, seed: int
) -> None:
    at = Scene((2,), T, S, place, seed)

    def atom(name: str) -> Meant:
        mask, allowed = MASKS[name](at)
        return mask, at.table(allowed)

    case = Case("random", "", score, "soft", "gqa", "float32", "no_dropout", place, given)
    problem = pose(at, *evaluate(expression, atom), case)
    for row in (TestReference, TestBlockwise, TestCheckpointed):
        row().check(problem, given == "traced")


@pytest.mark.parametrize(("strength", "some"), [(2, cases.ordinary), (3, cases.grid)])
def test_cases_cover_all_combinations(strength: int, some: Any) -> None:
    """Pairs in the ordinary rows, triples together with the grid."""
    missing = cases.all_tuples(cases.FACTORS, strength)
    for case in {*cases.ordinary(), *some()}:
        missing.difference_update(cases.tuples_of(case, strength))
    assert not missing


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("spread", ["soft", "sharp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_attention_has_the_errors_of_jax_nn(dtype: str, spread: str) -> None:
    """They agree up to the order of sums. In float32 the errors consist of this order only."""
    row = ("causal", "2x129x129", "bias_of_heads", spread, "gqa", dtype)
    problem = problem_of(Case(*row, "no_dropout", "from_0", "known"))
    dout, bias = problem.cotangents[0], problem.learned["array"]

    # Not under jit, which on CPUs takes no float16 products with float16 sums.
    def run(*primals: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return jax.nn.dot_product_attention(
                q, k, v, bias=bias[None], is_causal=True, implementation="xla"
            )

        out, pull = jax.vjp(attend, *primals)
        return out, *pull(dout)

    with jax.numpy_dtype_promotion("standard"):
        found = run(*problem.qkv, bias)
    known = {
        "cotangent": dout, "bias": oracle.float64(bias), "allowed": np.tri(129, dtype=bool),
    }  # fmt: skip
    plain, want = (
        [out, *gradients[:3], oracle.summed_to(gradients.bias, bias.shape)]
        for out, _, gradients in (
            plain_attention.attention(*problem.qkv, **known), exact(*problem.qkv, **known),
        )
    )  # fmt: skip
    for got, ours, true in zip(found, plain, want, strict=True):
        theirs, ours = oracle.error(got, true), oracle.error(ours.astype(got.dtype), true)
        assert ours < 2e-6 or theirs / 1.3 < ours < 1.3 * theirs
        assert dtype == "float32" or ours > 2e-6
