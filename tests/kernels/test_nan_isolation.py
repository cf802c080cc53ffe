"""NaN in one document: the outputs and gradients of another are those of finite inputs."""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import Capture, KVCache, dot_product_attention
from flax_mha.kernels.xla import reference
from flax_mha.masks import Causal, Lengths, Mask, PerHead, Segments
from flax_mha.scores import Alibi, Score, SoftCap
from tests.kernels.cases import KERNELS, pairs
from tests.kernels.test_ring import RULES

# The first document has D tokens, and NaN in its third. The loss reads the second document.
B, T, D, N, H = 2, 8, 5, 2, 8
IDS = (np.arange(T) >= D).astype(np.int32)
TABLE = IDS[:, None] == IDS
MASKS: dict[str, Mask | np.ndarray | jax.Array] = {
    "segments": Segments(IDS),
    "packed": Causal() & Segments(jnp.asarray(IDS)),
    "dense": jnp.asarray(TABLE),
    "per head": PerHead([Causal() & Segments(IDS), Segments(IDS)]),
    # The second document comes first here: its queries do not see the later tokens.
    "lengths": Lengths(np.array([T, T])[:, None] - np.where(IDS, 0, T - D)[None]) & Segments(IDS),
}


def learned() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    sizes = {"bias": (T, T), "slopes": (N,), "w": (), "sinks": (N,)}
    return {name: jnp.asarray(rng.normal(size=size), jnp.float32) for name, size in sizes.items()}


def all_scores(x: Any) -> dict[str, Any]:
    def wave(s: jax.Array, row: Any, head: Any, i: Any, j: Any, w: Any) -> jax.Array:
        return s * (1 + w * jnp.cos((i - j).astype(s.dtype)))

    scores = SoftCap(5.0), Alibi(x["slopes"]), Score(wave, (x["w"],))
    return {"bias": x["bias"], "sinks": x["sinks"], "scores": scores}


def check(
    kernel: str, mask: Any, call: Any, names: Any, dtype: str = "float32", kv_heads: int = 1,
    rtol: float = 0,
) -> None:  # fmt: skip
    """Compare the second document's numbers with NaN in the first, and without."""
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=(B, T, n, H)), dtype) for n in (N, kv_heads, kv_heads)]
    x = {name: learned()[name] for name in names}

    @jax.jit
    def run(qkv: Any, x: Any) -> Any:
        def loss(qkv: Any, x: Any) -> Any:
            out, lse = dot_product_attention(
                *qkv, mask=mask, kernel=kernel, return_residuals=True, **call(x)
            )
            out, lse = out[:, D:].astype(jnp.float32), lse[..., D:]
            return jnp.sin(out).sum() + jnp.sin(lse).sum(), (out, lse)

        (_, results), (of_qkv, of_x) = jax.value_and_grad(loss, (0, 1), has_aux=True)(qkv, x)
        if "bias" in of_x:
            of_x["bias"] = of_x["bias"][D:, D:]
        return results, [y[:, D:] for y in of_qkv], of_x

    clean = run(qkv, x)
    for place in range(3):
        bad = [y.at[:, 2].set(jnp.nan) if n == place else y for n, y in enumerate(qkv)]
        for got, want in zip(jax.tree.leaves(run(bad, x)), jax.tree.leaves(clean), strict=True):
            assert np.isfinite(want.astype(jnp.float32)).all()
            np.testing.assert_allclose(got, want, rtol)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize(
    ("kernel", "name", "more"), pairs(kernel=KERNELS, name=(*MASKS,), more=(False, True))
)
def test_nan_changes_nothing_in_other_documents(kernel: str, name: str, more: bool) -> None:
    """The gradients of sinks and learned scores, which all documents share, are unchanged too."""
    call = all_scores if more else lambda x: {"sinks": x["sinks"]}
    check(kernel, MASKS[name], call, learned() if more else ["sinks"])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["splash", "short", "flex"])
def test_nan_changes_nothing_in_other_documents_on_tpu(tpu, kernel: str) -> None:
    call = all_scores if kernel != "splash" else lambda x: {"sinks": x["sinks"]}
    names = learned() if kernel != "splash" else ["sinks"]
    check(kernel, MASKS["packed"], call, names)


@pytest.mark.slow
def test_nan_changes_nothing_in_other_documents_on_hopper(hopper_memory) -> None:
    def call(x: Any) -> dict[str, Any]:
        return {"sinks": x["sinks"], "scores": (Alibi(x["slopes"]),)}

    check("flex", MASKS["packed"], call, ["sinks", "slopes"], "bfloat16")


@pytest.mark.sampled(0.13, slow=0.2)
def test_nan_changes_nothing_in_other_documents_of_cudnn(nvidia) -> None:
    mask = Causal() & Segments(jnp.asarray(IDS), runs=True, at_most=2)
    # The sum over queries has another order where NaN is isolated.
    check("cudnn", mask, lambda x: {"sinks": x["sinks"]}, ["sinks"], "bfloat16", 2, rtol=1e-6)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("kernel", ["ring:blockwise", "ring:reference", "ulysses", "all_gather"])
def test_nan_changes_nothing_in_other_documents_on_meshes(kernel: str) -> None:
    """The first document crosses devices."""
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        check(kernel, MASKS["packed"], lambda x: {"sinks": x["sinks"]}, ["sinks"], kv_heads=2)


@pytest.mark.sampled(0.13, slow=0.2)
def test_nan_of_an_example_changes_no_gradient_of_others_with_slots_on_devices() -> None:
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    k = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, N, H)), jnp.float32)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(k: jax.Array, sinks: jax.Array) -> jax.Array:
        cache = KVCache.empty((B,), T, N, H).append(k, k)
        out = cache.attend(k[:, :1], jnp.full((B, 1), T - 1), sinks=sinks)
        return jnp.sin(out[1]).sum()

    with jax.set_mesh(mesh), nn.logical_axis_rules([("cache_length", "model")]):
        (dk, dsinks), want = (
            gradients(x, learned()["sinks"]) for x in (k.at[0, 2].set(jnp.nan), k)
        )
    np.testing.assert_array_equal(dk[1], want[0][1])
    np.testing.assert_array_equal(dsinks, want[1])


def test_nan_changes_no_gradient_of_captured_weights_in_other_documents() -> None:
    q, k = (jnp.asarray(np.random.default_rng(i).normal(size=(1, T, N, H)), "f4") for i in (0, 1))

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradients(q: jax.Array, k: jax.Array, slopes: jax.Array) -> jax.Array:
        call: dict[str, Any] = {"mask": MASKS["packed"], "scores": (Alibi(slopes),)}
        captured = dot_product_attention(q, k, k, capture=Capture(("weights",)), **call)[-1]
        return jnp.sin(captured["weights"][..., D:, :]).sum()

    got, want = (gradients(q, x, learned()["slopes"]) for x in (k.at[:, 2].set(jnp.nan), k))
    for x, y in zip(got[:2], want[:2], strict=True):
        np.testing.assert_array_equal(x[:, D:], y[:, D:])
    np.testing.assert_array_equal(got[2], want[2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_reaches_the_gradient_of_queries_that_see_it(kernel: str) -> None:
    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, k, mask=Causal(), kernel=kernel).sum()

    q = jnp.ones((1, 4, 1, 2))
    dq = jax.jit(jax.grad(loss))(q, q.at[:, 2].set(jnp.nan))
    np.testing.assert_array_equal(np.isnan(dq[0, :, 0, 0]), [False, False, True, True])


@pytest.mark.sampled(0.13, slow=0.2)
def test_gpus_isolate_nan_as_loops_do_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly, under jit, vmap, shard_map and remat, forward and backward."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(4, 6, 2, 8)), jnp.float32) for _ in range(3))
    qkv = q, k.at[1, 5].set(jnp.nan), v.at[2, 4].set(jnp.inf)

    def one(*qkv: jax.Array) -> jax.Array:
        return dot_product_attention(*qkv, mask=Causal(), kernel="reference")

    def loss(*qkv: jax.Array) -> jax.Array:
        out = one(*qkv)
        return jnp.sum(jnp.where(jnp.isnan(out), 0, out))

    def gradient(*qkv: jax.Array) -> Any:
        return jax.grad(loss, (0, 1, 2))(*qkv)

    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("rows")
    parts = jax.shard_map(jax.vmap(one), mesh=mesh, in_specs=rows, out_specs=rows)
    calls = one, gradient, jax.vmap(gradient), jax.checkpoint(gradient), parts
    wanted = [jax.jit(call)(*qkv) for call in calls]
    real = reference.attend
    monkeypatch.setattr(reference, "attend", lambda *args: real(*args[:4], "gpu"))
    jax.clear_caches()
    for call, want in zip(calls, wanted, strict=True):
        fresh = jax.jit(lambda *x, call=call: call(*x))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), fresh(*qkv), want
        )
    text = str(jax.make_jaxpr(jax.vmap(one))(*qkv))
    assert not re.findall(r"(cond|while)\[", text)
    jax.clear_caches()
