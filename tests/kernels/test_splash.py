"""The kernel for TPUs: its numbers in Pallas' interpret mode, and what it refuses."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info
from jax.sharding import AxisType

from flax_mha import dot_product_attention, explain, sharding
from flax_mha.grid import whole
from flax_mha.kernels import ids, lazy, spec, splash
from flax_mha.masks import (
    Causal,
    Dense,
    Lengths,
    Mask,
    PerHead,
    Predicate,
    Prefix,
    Segments,
    Window,
)
from flax_mha.scores import Alibi, SoftCap
from flax_mha.shapes import Dims
from tests import oracle
from tests.kernels.oracle_check import B, H, N, arrays, check, table

T, S = 280, 300
RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(-2, 3, (B, S)), axis=1)
# The second row's keys have no segment of its first queries: these see nothing.
PACKED = Segments(jnp.asarray(IDS[:, :T]), jnp.asarray(np.maximum(IDS, [[-2], [0]])))
OTHER = Segments(jnp.asarray(RNG.integers(0, 2, T)), jnp.asarray(RNG.integers(0, 2, S)))
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Window(20, 3),
    "causal window": Causal() & Window(left=130),
    "prefix": Prefix(40),
    "segments": PACKED,
    "packed": Causal() & PACKED,
    "packed window": Causal() & PACKED & Window(left=40),
    "two kinds of segments": PACKED & OTHER & Causal(),
    "lengths": Lengths(jnp.array([100, 0])),
    "lengths of queries": Lengths(jnp.array([100, 300]), jnp.array([280, 5])) & Causal(),
    "lengths and segments": Lengths(jnp.array([150, 290]), jnp.array([280, 270])) & PACKED,
    "keys": Dense(jnp.asarray(RNG.random((B, 1, 1, S)) < 0.5)) & Causal(),
    "queries": Dense(jnp.asarray(RNG.random((T, 1)) < 0.5)) & Causal(),
    "table": Dense(np.kron(RNG.random((28, 30)) < 0.3, np.ones((10, 10))) > 0),
    "table of heads": Dense(RNG.random((N, T, S)) < 0.3) & PACKED,
    "predicate": Predicate(lambda b, n, i, j, m: (i + j) % m == 0, (np.array(3),)),
    "predicate of heads": Predicate(lambda b, n, i, j: j <= i + 60 * n - 100),
    "per head": PerHead([Causal(), Window(4, 4), ~Causal(), Causal()]) & PACKED,
    "not": ~(Causal() & Window(100)),
    "nothing": Window(0, 0) & ~Causal(),
}


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device that says it is a TPU, where Pallas is interpreted; blocks of 128."""
    real = pl.pallas_call
    monkeypatch.setattr(
        pl, "pallas_call", lambda *args, **kwargs: real(*args, **{**kwargs, "interpret": True})
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(splash, "BLOCKS", {128: 128})


@pytest.mark.parametrize(
    ("mask", "K"),
    [(mask, 2) for mask in MASKS]
    + [(mask, K) for mask in ("packed", "per head", "table of heads") for K in (1, 4)],
)
def test_masks(tpu, mask: str, K: int) -> None:
    known = {"allowed": table(MASKS[mask], T, S)}
    check("splash", arrays(T, S, K), known, lambda _: {"mask": MASKS[mask]}, {})


@pytest.mark.parametrize("K", [4, 1])
@pytest.mark.parametrize("mask", ["none", "packed", "lengths", "per head", "table of heads"])
def test_sinks_and_soft_cap(tpu, mask: str, K: int) -> None:
    sinks = jnp.array([0.0, 1.0, -2.0, 5.0])
    known = {"allowed": table(MASKS[mask], T, S), "sinks": sinks, "cap": 1.5}
    *qkv, cotangent = arrays(T, S, K)
    operands = [4 * qkv[0], *qkv[1:], cotangent]

    def call(learned):
        return {"mask": MASKS[mask], "scores": (SoftCap(1.5),), "sinks": learned["sinks"]}

    check("splash", operands, known, call, {"sinks": sinks})


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize(("t", "s"), [(1, 1), (7, 64), (129, 257), (1, 600), (256, 128)])
def test_sizes(tpu, K: int, t: int, s: int) -> None:
    mask = Causal() | Window(3, 3)
    check("splash", arrays(t, s, K), {"allowed": table(mask, t, s)}, lambda _: {"mask": mask}, {})


@pytest.mark.parametrize("mask", ["none", "packed"])
def test_half_precision(tpu, mask: str) -> None:
    """With a scale that is a power of two: others round the queries once more."""
    known = {"allowed": table(MASKS[mask], T, S), "scale": 0.25}
    operands = arrays(T, S, 2, "bfloat16")
    check("splash", operands, known, lambda _: {"mask": MASKS[mask], "scale": 0.25}, {})


def run(q, k, v, mask, kernel: str = "splash", **call):
    return dot_product_attention(q, k, v, mask=mask, kernel=kernel, return_residuals=True, **call)


@pytest.mark.parametrize("sinks", [None, jnp.array([0.0, -jnp.inf, 1.0, 2.0])])
def test_cotangents_of_the_lse(tpu, sinks) -> None:
    """Beside queries that see nothing."""
    *qkv, cotangent = arrays(T, S, 2)
    mask = MASKS["packed"]
    lse = jnp.asarray(RNG.normal(size=(B, N, T)), jnp.float32)
    empty = ~table(mask, T, S).any(-1)
    assert empty.any()
    results = {}
    for kernel in ("splash", "reference"):

        @jax.jit
        def both(qkv, kernel=kernel):
            results, pull = jax.vjp(lambda qkv: run(*qkv, mask, kernel, sinks=sinks), qkv)
            return *results, *pull((cotangent, lse))[0]

        results[kernel] = both(qkv)
    for got, want in zip(results["splash"], results["reference"], strict=True):
        seen = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(got), seen)
        assert oracle.error(got[seen], want[seen]) < 1e-5
    if sinks is None:
        out, lse, dq, *_ = results["splash"]
        rows = np.broadcast_to(empty[:, 0], (B, T))
        np.testing.assert_array_equal(out[rows], 0)
        np.testing.assert_array_equal(dq[rows], 0)
        np.testing.assert_array_equal(np.isneginf(lse), np.broadcast_to(empty, lse.shape))


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_pairs_do_not_leak(tpu, poison: float, skipped: bool) -> None:
    """What a masked key, value or query holds changes nothing, forward and backward."""
    *qkv, cotangent = arrays(T, S, 2)
    q, k, v = qkv
    call = {"mask": Predicate(lambda b, n, i, j: (j != 4) & (i != 2))}
    if skipped:
        # The first block of queries visits no keys.
        call = {"mask": Causal() & (np.arange(S) != 4), "kv_positions": 130}

    @jax.jit
    def both(q, k, v):
        results, pull = jax.vjp(lambda *qkv: run(*qkv, **call), q, k, v)
        return *results, *pull((cotangent, jnp.zeros((B, N, T))))

    clean = both(q, k, v)
    dirty = both(q.at[:, 2].set(poison), k.at[:, 4].set(poison), v.at[:, 4].set(poison))
    for got, want in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(clean[0][:, 2], 0)


def test_visible_nans_are_seen(tpu) -> None:
    """A NaN reaches the queries that may see it, and only those."""
    q, k, v, _ = arrays(T, S, 2)
    for poisoned in ((q, k.at[:, 4].set(jnp.nan), v), (q, k, v.at[:, 4].set(jnp.inf))):
        out, lse = jax.jit(lambda *qkv: run(*qkv, Causal()))(*poisoned)
        assert np.isnan(out[:, 4:]).all()
        assert np.isnan(lse[..., 4:]).all()
        assert np.isfinite(out[:, :4]).all()


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_batch_dimensions_vmap_remat_and_scan(tpu, batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (
        jnp.asarray(rng.normal(size=(*batch, L, M, H)), jnp.float32)
        for L, M in ((140, 4), (150, 2), (150, 2))
    )
    segments = jnp.asarray(rng.integers(0, 2, (*batch, 150)))

    def one(q, k, v, segments):
        mask = Causal() & Segments(segments[..., :140], segments)
        return dot_product_attention(q, k, v, mask=mask, kernel="splash")

    mapped = one
    for _ in batch:
        mapped = jax.vmap(mapped)

    def scanned(q, k, v, segments):
        def step(carry, _):
            return carry + jax.remat(one)(q + carry * 0, k, v, segments), None

        return jax.lax.scan(step, jnp.zeros(q.shape), None, length=2)[0] / 2

    def both(attend, *args):
        loss = lambda *qkv: (attend(*qkv, args[-1]) ** 2).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args[:3])

    expected = both(one, q, k, v, segments)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5)
    for attend in (mapped, scanned):
        jax.tree.map(close, both(attend, q, k, v, segments), expected)


POSITIONS = {
    "counted": (20, 5),
    "reversed queries": (np.arange(T)[::-1], None),
    "every third key": (np.arange(T) + 7, 3 * np.arange(S) - 90),
    "any keys": (None, RNG.permutation(S)),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", [Causal() & Window(60), Prefix(9) & Lengths(jnp.array([150, 9]))])
def test_positions(tpu, positions: str, mask: Mask) -> None:
    operands = arrays(T, S, 2)
    q, k = POSITIONS[positions]
    q, k = (
        np.arange(L) + (x or 0) if x is None or isinstance(x, int) else x
        for x, L in ((q, T), (k, S))
    )
    dims = Dims((B,), T, S, N, 2, H, 5)
    allowed = np.asarray(mask.bind(dims).allowed(whole(dims, q, k)))
    call = {"q_positions": q, "kv_positions": k, "mask": mask, "scale": 0.7}
    check("splash", operands, {"allowed": allowed, "scale": 0.7}, lambda _: call, {})


def test_traced_positions_where_only_ids_are_asked(tpu) -> None:
    operands = arrays(T, S, 2)
    at = np.arange(S)[::-1]
    call = {"kv_positions": jnp.asarray(at), "mask": Lengths(jnp.array([30, 200]))}
    allowed = (at < np.array([[30], [200]]))[:, None, None]
    check("splash", operands, {"allowed": allowed}, lambda _: call, {})


EXTREMES = np.array([-(2**31), 2**31 - 1, 0, 1, 2, 3, 4, -1])


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_ids_are_exact(lengths: bool, kinds: int) -> None:
    """Whatever the ids: all that int32 holds."""
    rng = np.random.default_rng(4)
    dims = Dims((3,), 20, 24, 1, 1, 1, 1)
    mask: Mask = Segments(rng.choice(EXTREMES, (3, 20)), rng.choice(EXTREMES, (3, 24)))
    for _ in range(kinds - 1):
        mask &= Segments(rng.choice(EXTREMES[:3], 20), rng.choice(EXTREMES[:3], 24))
    if lengths:
        mask &= Lengths(jnp.array([20, 3, 0]), jnp.array([15, 10, 20]))
    mask = mask.bind(dims)
    call = spec.AttentionSpec(mask, (), None, None, None, None, 1.0)
    (q, k), rest = ids.split(call, dims)
    assert not rest
    np.testing.assert_array_equal((q[:, :, None] == k[:, None])[:, None], mask.allowed(whole(dims)))


@pytest.mark.parametrize(
    "mask",
    [Causal(), Window(1024), Predicate(lambda b, n, i, j: j % 64 <= i), Causal() | Prefix(9)],
    ids=["causal", "window", "predicate", "prefix"],
)
def test_nothing_of_size_t_s_is_made_before_tracing(mask: Mask) -> None:
    length = 2**17
    dims = Dims((), length, length, 8, 8, 64, 64)
    call = spec.AttentionSpec(mask.bind(dims), (), None, None, None, None, 1.0)
    lowered = lazy.lower(call, dims, lazy.Blocks(512, 512))
    assert not isinstance(lowered, str)
    (known,) = lowered.masks
    info, function = splash_attention_mask_info.process_mask(known, (512, 512))
    assert function is not None
    assert info.partial_mask_blocks is None
    assert sum(x.nbytes for x in info if isinstance(x, np.ndarray)) < 2**20


def test_equal_masks_are_equal() -> None:
    """Splash keeps what it made of a mask for the next layer that has the same."""
    dims = Dims((2,), 300, 300, 2, 2, 8, 8)

    def lowered(mask, dims=dims):
        call = spec.AttentionSpec(mask.bind(dims), (), None, None, None, None, 1.0)
        return lazy.lower(call, dims, lazy.Blocks(128, 128)).masks[0]

    same = lowered(Causal() & Window(7)), lowered(Causal() & Window(7))
    assert same[0] == same[1]
    assert hash(same[0]) == hash(same[1])
    for other in (lowered(Causal() & Window(8)), lowered(Causal() & Window(7), dims._replace(S=9))):
        assert other != same[0]


@pytest.mark.parametrize("mask", ["packed", "lengths and segments", "table"])
@pytest.mark.parametrize("sinks", [None, jnp.array([0.0, 1.0, -2.0, 5.0])])
def test_on_the_shards_of_a_mesh(tpu, mask: str, sinks) -> None:
    qkv = arrays(T, S, 2)[:3]

    def both(qkv, sinks):
        def loss(qkv, sinks):
            out, lse = run(*qkv, MASKS[mask], sinks=sinks)
            return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

        return jax.value_and_grad(loss, (0, 1) if sinks is not None else 0)(qkv, sinks)

    expected = jax.jit(both)(qkv, sinks)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        got = jax.jit(both)(qkv, sinks)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, got, expected)


Q = jnp.zeros((B, T, N, H))
TRACED = jnp.zeros((T, S), bool)


class Reversed(Segments):
    """Not what its parent is."""

    def allowed(self, at):
        return ~super().allowed(at)


class Doubled(SoftCap):
    """Likewise."""


REFUSED = {
    "a subclass of Segments": (r"Reversed holds arrays", {"mask": Reversed(IDS[0, :T], PACKED.kv)}),
    "a subclass of SoftCap": (r"one SoftCap only, got Doubled", {"scores": (Doubled(2.0),)}),
    "float16": (r"float32 and bfloat16, got float16", {"dtype": "float16"}),
    "no query": (r"no rows, queries or keys", {"t": 0}),
    "no key": (r"no rows, queries or keys", {"s": 0}),
    "no row": (r"no rows, queries or keys", {"batch": 0}),
    "features": (r"at most 128 features, got 136", {"features": 136}),
    "dropout": (r"no dropout", {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}),
    "precision": (r"no precision setting, got highest", {"precision": "highest"}),
    "alibi": (r"one SoftCap only, got Alibi", {"scores": (Alibi(),)}),
    "bias": (r"one SoftCap only, got SoftCap, Bias",
             {"scores": (SoftCap(2.0),), "bias": jnp.zeros(S)}),
    "two caps": (r"one SoftCap only, got SoftCap, SoftCap", {"scores": (SoftCap(2.0),) * 2}),
    "traced table": (r"Dense holds arrays that are not NumPy's", {"mask": TRACED}),
    "lengths per query": (r"Lengths holds arrays",
                          {"mask": Lengths(jnp.zeros((B, T), int)) & Causal()}),
    "prefix per row": (r"Prefix holds arrays", {"mask": Prefix(jnp.zeros(B, int))}),
    "segments joined by |": (r"Or holds arrays", {"mask": Causal() | PACKED}),
    "segments negated": (r"Not holds arrays", {"mask": ~PACKED}),
    "segments per head": (r"PerHead holds arrays", {"mask": PerHead([Causal(), PACKED] * 2)}),
    "traced args": (r"Predicate holds arrays",
                    {"mask": Predicate(lambda b, n, i, j, m: j < m, (jnp.array(3),))}),
    "known, by row": (r"differs between rows", {"mask": Prefix(np.array([3, 4]))}),
    "by row": (r"differs between rows", {"mask": Predicate(lambda b, n, i, j: j <= i + b)}),
    "large table": (r"more than 100 entries: T·S = 280·300, for 1 dif", {"mask": MASKS["table"]}),
    "traced positions": (r"q_positions are not NumPy's",
                         {"mask": Causal(), "q_positions": jnp.arange(T)}),
    "positions by row": (r"kv_positions differ between rows",
                         {"mask": Causal(), "kv_positions": np.zeros((B, S), int)}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(tpu, monkeypatch, name: str) -> None:
    """Each by name, with the same words from both functions; auto takes another kernel."""
    monkeypatch.setattr(lazy, "TABLE", 100)
    reason, call = REFUSED[name]
    sizes = {"t": T, "s": S, "batch": B, "features": H, "dtype": "float32"}
    sizes |= {key: call[key] for key in call if key in sizes}
    call = {key: call[key] for key in call if key not in sizes}
    batch, dtype = sizes["batch"], sizes["dtype"]
    q = jnp.zeros((batch, sizes["t"], N, sizes["features"]), dtype)
    k = jnp.zeros((batch, sizes["s"], N, sizes["features"]), dtype)
    explanation = explain(q, k, k, **call)
    assert explanation.chosen != "splash"
    with pytest.raises(ValueError, match=f"can't run this call: .*{reason}"):
        dot_product_attention(q, k, k, kernel="splash", **call)


def test_a_function_that_closes_over_traced_arrays_is_refused(tpu) -> None:
    @jax.jit
    def call(limit):
        mask = Predicate(lambda b, n, i, j: j < limit)
        return dot_product_attention(Q, Q, Q, mask=mask, kernel="splash")

    with pytest.raises(ValueError, match="function holds traced arrays; give them as its args"):
        call(jnp.array(3))


def test_inside_a_shard_map(tpu) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    def call(q):
        return dot_product_attention(q, q, q, mask=Causal(), kernel="splash")

    unchecked = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    )
    np.testing.assert_array_equal(unchecked(Q), 0)
    with pytest.raises(ValueError, match=r"inside jax.shard_map it needs check_vma=False"):
        jax.jit(jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows))(Q)


MESHES = {
    "no mesh": (None, (), r"between the 8 devices by itself; wrap in `with jax.set_mesh"),
    "no rules": (AxisType.Auto, (), r"no rules; wrap in"),
    "explicit": (AxisType.Explicit, sharding.RULES, r"Auto axes, not Explicit"),
    "rows": (AxisType.Auto, (("batch", "model"),), r"2 rows of the batch do not .* the 4 devices"),
    "heads": (AxisType.Auto, (("heads", "model"), ("kv_heads", "model")), r"2 key/value heads do"),
    "rules": (AxisType.Auto, (("heads", "model"),), r"heads \('model',\), kv_heads \(\)"),
    "by head": (AxisType.Auto, (("heads", "data"), ("kv_heads", "data")), r"masks of their own"),
}


@pytest.mark.parametrize("name", MESHES)
def test_refusals_on_meshes(tpu, monkeypatch, name: str) -> None:
    kind, rules, reason = MESHES[name]
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    x = jax.ShapeDtypeStruct((B, T, N, H), jnp.float32)
    kv = jax.ShapeDtypeStruct((B, T, 2, H), jnp.float32)
    ask = functools.partial(explain, x, kv, kv, mask=PerHead([Causal(), Window(1)] * 2))
    if kind is None:
        refused = ask().refused
    else:
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            refused = ask().refused
    assert "splash" in refused
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refused["splash"])


def test_auto_prefers_it_where_it_runs(tpu) -> None:
    x = jax.ShapeDtypeStruct((2, 4096, 4, 64), jnp.bfloat16)
    assert explain(x, x, x, mask=Causal()).chosen == "splash"


def test_elsewhere_it_refuses() -> None:
    with pytest.raises(ValueError, match="runs on TPU only, this is cpu"):
        dot_product_attention(Q, Q, Q, kernel="splash")
