"""flax_mha's own kernel for Hopper: its synchronisation, and its numbers in Pallas' interpreter."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import Platform, dot_product_attention, explain
from flax_mha.kernels import choose, flex
from flax_mha.kernels.call.bind import bind_call
from flax_mha.kernels.call.spec import Sums
from flax_mha.kernels.flex.hopper import LACKING
from flax_mha.masks import Causal, Lengths, Predicate, Segments
from flax_mha.scores import Alibi, Score, SoftCap
from tests.kernels.test_flex import close, pulled
from tests.support import barriers
from tests.support.platforms import pretend

H200 = Platform("gpu", "NVIDIA H200", cudnn=(9, 20, 0))
needs_mosaic = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
if LACKING is None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from flax_mha.kernels.flex.hopper import sync


def programs(features: int) -> dict[str, Any]:
    """Return the jaxpr of each kernel of a call and its gradients."""
    q, k = (jax.ShapeDtypeStruct((1, 256, n, features), jnp.bfloat16) for n in (2, 1))

    def loss(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        call = {"mask": Lengths(jnp.array([200])), "scores": (Alibi(slopes),)}
        *given, spec = bind_call(q, k, v, **call)
        return flex.lower(*given, spec.replace(platform=H200)).run()[0].astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(q, k, k, jnp.ones(2))
    return dict(barriers.kernels(jaxpr.jaxpr))


@needs_mosaic
@pytest.mark.parametrize(
    ("features", "names"),
    [
        (64, "flex_forward flex_dkv flex_dq flex_dleaf"),
        (256, "flex_forward flex_dk flex_dv flex_dq flex_dleaf"),
    ],
)
def test_kernels_commit_wait_and_release_in_order(features: int, names: str) -> None:
    found = programs(features)
    assert set(found) == set(names.split())
    assert not [x for jaxpr in found.values() for x in barriers.violations(jaxpr)]


def _early(self: Any, step: jax.Array, wait: Any) -> Any:
    buffer = wait(self, step)
    plgpu.barrier_arrive(self.free.at[self._slot(step)])
    return buffer


@needs_mosaic
@pytest.mark.sampled(0.2)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("no wait", "a matmul reads a buffer that is not filled"),
        ("no commit", "a matmul reads a store that is not committed"),
        ("no release", "a buffer is not released"),
        ("early release", "a matmul reads a buffer that is not filled"),
        ("release of another slot", "a slot is released that is not held"),
        ("wait for another slot", "a matmul reads a buffer that is not filled"),
    ],
)
def test_wrong_synchronisation_is_found(monkeypatch, traced_anew, name: str, rule: str) -> None:
    ring = sync.BufferRing
    wait, slot = ring.wait, ring._slot
    changes: dict[str, tuple[Any, str, Any]] = {
        "no wait": (ring, "wait", lambda self, step: self.buffers.at[slot(self, step)]),
        "no commit": (sync.plgpu, "commit_smem", lambda: None),
        "no release": (ring, "release", lambda self, step: None),
        "early release": (ring, "wait", lambda self, step: _early(self, step, wait)),
        "release of another slot": (
            ring, "release",
            lambda self, step: plgpu.barrier_arrive(self.free.at[slot(self, step + 1)]),
        ),
        "wait for another slot": (
            ring, "wait",
            lambda self, step: (wait(self, step + 1), self.buffers.at[slot(self, step)])[1],
        ),
    }  # fmt: skip
    monkeypatch.setattr(*changes[name])
    assert rule in {x for jaxpr in programs(64).values() for x in barriers.violations(jaxpr)}


def arrays(T: int, S: int, H: int, Hv: int, b: int = 1) -> list[jax.Array]:
    """Return q, k, v of two query heads and one key/value head, and a cotangent."""
    rng = np.random.default_rng(1)
    sizes = [(T, 2, H), (S, 1, H), (S, 1, Hv), (T, 2, Hv)]
    return [jnp.asarray(rng.normal(size=(b, *size)), jnp.bfloat16) for size in sizes]


@pytest.mark.sampled(0.08)
def test_flex_matches_reference_on_hopper(hopper_memory) -> None:
    """With full, partial and empty tiles, and races detected."""
    args = lambda x: {"mask": Causal()}, arrays(130, 256, 8, 8), {}
    close(pulled("flex", *args), pulled("reference", *args), 2**-7)


def learned(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    rng = np.random.default_rng(2)
    return {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}


@pytest.mark.slow
def test_gradients_from_saved_results_match_on_hopper(hopper_memory) -> None:
    """As a ring's steps take them: each has some of the keys, and the results of all."""
    q, k, v, cotangent = arrays(128, 256, 8, 8)
    x = learned(s=(2,))

    def call(x: Any) -> dict[str, Any]:
        return {"scores": (Alibi(x["s"]),)}

    (out, lse), want = pulled("reference", call, (q, k, v, cotangent), x)
    result = out.astype(q.dtype), Sums.of(lse)

    @jax.jit
    def step(start: Any, k: Any, v: Any, x: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, x: Any) -> Any:
            *given, spec = bind_call(q, k, v, kv_positions=start + jnp.arange(128), **call(x))
            out, sums = flex.lower(*given, spec.replace(platform=H200)).run(result)
            return out, sums.lse

        return jax.vjp(attend, q, k, v, x)[1]((cotangent, jnp.sin(lse)))

    parts = [step(n, k[:, n : n + 128], v[:, n : n + 128], x) for n in (0, 128)]
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32), part) for part in parts]
    dq, dx = (jax.tree.map(jnp.add, wide[0][n], wide[1][n]) for n in (0, 3))
    dk, dv = (jnp.concatenate([part[n] for part in parts], 1) for n in (1, 2))
    close((dq, dk, dv, dx), want, 2**-6)


@needs_mosaic
@pytest.mark.parametrize("kernel", ["flex", "ring:flex"])
def test_each_device_of_a_mesh_runs_its_own_kernels(monkeypatch, kernel: str) -> None:
    """Traced only: the interpreter has one device."""
    pretend(monkeypatch, "gpu")
    monkeypatch.setattr("flax_mha.kernels.chips.gpus.capability", lambda device: (9, 0))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows, length = ("data", None) if kernel == "flex" else (None, "data")
    rules = (("batch", rows), ("length", length), ("heads", None), ("kv_heads", None))
    x = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = dot_product_attention(q, k, v, mask=Causal(), kernel=kernel)
        return out.astype(jnp.float32).sum()

    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x)
    found = [name for name, _ in barriers.kernels(jaxpr.jaxpr)]
    # Around a ring, one pass each way for the keys of each device.
    assert found.count("flex_dq") == found.count("flex_dkv") >= (1 if kernel == "flex" else 2)


def explained(kernel: str = "auto", dtype: str = "bfloat16", H: int = 64, **call: Any) -> Any:
    x = jax.ShapeDtypeStruct((1, 4096, 2, H), dtype)
    return explain(x, x, x, kernel=kernel, platform=call.pop("platform", H200), **call)


@needs_mosaic
def test_auto_takes_flex_only_on_gpus_that_have_run_its_contract(monkeypatch) -> None:
    call = {"mask": Causal(), "scores": (Alibi(),)}
    assert explained(**call).chosen == "flex"
    monkeypatch.setattr(choose, "FLEX_GPUS", frozenset())
    assert explained(**call).chosen == "blockwise"
    assert "only on kinds of GPUs that have run its contract" in explained(**call).refused["flex"]
    assert explained("flex", **call).chosen == "flex"


@needs_mosaic
@pytest.mark.parametrize(
    ("reason", "call"),
    [
        (r"at most 256 features, got 264", {"H": 264}),
        (r"Hopper generation only, this is NVIDIA B200",
         {"platform": Platform("gpu", "NVIDIA B200", cudnn=(9, 20, 0))}),
        (r"lacks an operation of a mask or a score: sort",
         {"scores": (Score(lambda s, *_: jnp.sort(s)),)}),
        (r"score: slice",
         {"mask": Predicate(lambda b, n, i, j: i - i[..., :1, :] > j)}),
        (r"score: a look-up in an array int32\[1, 4\]",
         {"mask": Predicate(lambda b, n, i, j, x: x[i % 4] > j, (jnp.arange(4),))}),
    ],
)  # fmt: skip
def test_flex_refuses_on_hopper_with_reason(reason: str, call: dict[str, Any]) -> None:
    assert re.search(reason, explained("flex", **call).refused["flex"])
    assert explained(**call).chosen in ("cudnn", "blockwise")


@pytest.mark.skipif(LACKING is None, reason="this JAX has all that the kernel needs")
def test_flex_refuses_hopper_on_old_jax_by_name() -> None:
    assert "needs JAX 0.12" in explained("flex").refused["flex"]


IDS = np.sort(np.random.default_rng(1).integers(0, 3, (1, 200)))
PACKED = Causal() & Segments(jnp.asarray(IDS[:, :130]), jnp.asarray(IDS))


def user_score(s, row, head, i, j, w, t):
    """Use branches and nested functions."""
    wave = jnp.cos((i - j + head + row).astype(s.dtype)) + jnp.floor(s / 4) + jnp.expm1(s / 9)
    branches = [jnp.sin, lambda wave: w * jnp.tanh(wave), jnp.cos]
    wave = jax.lax.switch((w < 9).astype(jnp.int32), branches, wave)
    return s * (1 + wave) + t * (j - i).astype(s.dtype) / 50 + jax.checkpoint(jax.nn.relu)(s)


# Each call as a function of learned arrays, their shapes, and the features of q and v.
CALLS: dict[str, tuple[Any, dict[str, tuple[int, ...]], tuple[int, int]]] = {
    "everything": (
        lambda x: {
            "mask": PACKED, "bias": x["bias"], "sinks": x["sinks"],
            "scores": (SoftCap(1.5), Alibi(x["slopes"])), "scale": 0.3 + x["scale"] / 10,
            "dropout_rate": 0.3, "dropout_rng": jax.random.key(7),
        },
        {"slopes": (2,), "bias": (130, 200), "sinks": (2,), "scale": ()}, (8, 5),
    ),
    "user_score": (
        lambda x: {
            "mask": Predicate(lambda b, n, i, j, m: (i + j) % m != b, (np.array(3),)),
            "scores": (Score(user_score, (x["w"], x["t"])),),
        },
        {"w": (), "t": ()}, (128, 192),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_all_arrays_match_reference_on_hopper(hopper_memory, name: str) -> None:
    call, shapes, features = CALLS[name]
    args = call, arrays(130, 200, *features), learned(**shapes)
    close(pulled("flex", *args), pulled("reference", *args), 2**-6)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 130, 200), (1, 2, 130, 200), (2, 1, 130, 200), (1, 2, 130, 1), (2, 1, 1, 200),
     (1, 1, 1, 1)],
)  # fmt: skip
def test_gradients_of_biases_sum_over_what_shares_them_on_hopper(hopper_memory, shape: Any) -> None:
    """One tile is empty, so its gradients are 0. The bias passes through a soft cap."""

    def call(x: Any) -> dict[str, Any]:
        given = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(7)}
        return {"mask": Causal(), "bias": x["b"], "scores": (SoftCap(2.0),), **given}

    args = call, arrays(130, 200, 8, 8, b=2), learned(b=shape)
    close(pulled("flex", *args), pulled("reference", *args), 2**-6)
