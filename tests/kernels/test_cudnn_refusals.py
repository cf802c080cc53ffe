"""Calls that the kernel for NVIDIA GPUs refuses, its reasons, and the choice of auto."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import dot_product_attention, explain
from flax_mha.kernels.cudnn import primitives
from flax_mha.masks import Causal, Prefix
from flax_mha.scores import Alibi, Bias, SoftCap
from tests.repository.test_kernel_table import traced
from tests.support.arrays import zeros

B, T, S, N, H = 2, 40, 64, 4, 8
HALF = zeros((T, S), jnp.bfloat16)


class Doubled(Bias):
    """A subclass with another meaning."""


REFUSED = {
    "float32": (r"float16 and bfloat16, got float32", {"dtype": "float32"}),
    "no query": (r"no rows, queries or keys", {"t": 0}),
    "no key": (r"no rows, queries or keys", {"s": 0}),
    "no row": (r"no rows, queries or keys", {"batch": 0}),
    "one": (r"no gradient of one query and one key", {"t": 1, "s": 1}),
    "features": (r"at most 256 features here, got 264", {"features": 257}),
    "dropout": (r"no dropout", {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}),
    "precision": (r"no precision setting, got highest", {"precision": "highest"}),
    "alibi": (r"one Bias only, got Alibi", {"scores": (Alibi(),)}),
    "cap": (r"one Bias only, got SoftCap", {"scores": (SoftCap(2.0),)}),
    "two biases": (r"one Bias only, got Bias, Bias", {"scores": (Bias(HALF),), "bias": HALF}),
    "a subclass of Bias": (r"one Bias only, got Doubled", {"scores": (Doubled(HALF),)}),
    "a float32 bias": (r"got float32 to bfloat16", {"bias": zeros((T, S))}),
    "a bias in float16": (r"got float16 to float16",
                          {"bias": HALF.astype("float16"), "dtype": "float16"}),
    "a bias of keys": (r"bias of \(1, 64\) .* T·S = 40·64", {"bias": HALF[0]}),
    "a mask of float16": (r"hides pairs of Or by a bfloat16 bias, got float16",
                          {"mask": Causal() & Prefix(3), "dtype": "float16"}),
    "a large mask": (r"pairs of Or by a bias of 2,147,549,184 bytes, more than 1,073,741,824",
                     {"mask": Prefix(3), "t": 2**15 + 1, "s": 2**15}),
}  # fmt: skip


@pytest.mark.sampled(0.5, slow=0.3)
@pytest.mark.parametrize("name", REFUSED)
def test_cudnn_refuses_with_reason(hopper, name: str) -> None:
    """Both functions give the same reason, and auto takes another kernel.

    Arrays of JAX are traced.
    """
    reason, call = REFUSED[name]
    sizes = {"t": T, "s": S, "batch": B, "features": H, "dtype": "bfloat16"}
    sizes |= {key: call[key] for key in call if key in sizes}
    call = {key: call[key] for key in call if key not in sizes}
    batch, dtype = sizes["batch"], sizes["dtype"]
    q = zeros((batch, sizes["t"], N, sizes["features"]), dtype)
    k = zeros((batch, sizes["s"], N, sizes["features"]), dtype)
    explanation = traced(functools.partial(explain, q, k, k), call)
    assert explanation.chosen in ("reference", "blockwise")
    with pytest.raises(ValueError, match=f"can't run this call: .*{reason}"):
        traced(functools.partial(dot_product_attention, q, k, k, kernel="cudnn"), call)


def half(t: int = T, s: int = T, features: int = H, heads: int = N) -> list:
    kv = jax.ShapeDtypeStruct((B, s, heads, features), jnp.bfloat16)
    return [jax.ShapeDtypeStruct((B, t, N, features), jnp.bfloat16), kv, kv]


def device(capability: str = "9.0", version: str = "cuda 13000") -> SimpleNamespace:
    return SimpleNamespace(
        client=SimpleNamespace(platform_version=version), compute_capability=capability,
        device_kind="a thing",
    )  # fmt: skip


@pytest.mark.parametrize(("found", "cudnn", "features", "reason"), [
    (device(version="rocm 7"), 92000, 64, r"NVIDIA GPUs only, this is a thing"),
    (device(), None, 64, r"cuDNN is not detected"),
    (device("7.5"), 92000, 64, r"capability 8.0 and cuDNN \(9, 10, 2\), got .*\(7, 5\)"),
    (device(), 91001, 64, r"got .*\(9, 10, 1\)"),
    (device("8.0"), 92000, 136, r"at most 128 features here, got 136"),
    (device("10.0"), 92000, 136, r"at most 128 features here, got 136"),
    (device("9.0"), 91002, 256, None),
    (device("12.0"), 92301, 128, None),
])  # fmt: skip
def test_refused_devices(monkeypatch, found, cudnn, features: int, reason: str | None) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [found])
    versions = cudnn and SimpleNamespace(cudnn_get_version=lambda: cudnn)
    monkeypatch.setattr(primitives, "cuda_versions", versions)
    refused = explain(*half(features=features), mask=Causal()).refused.get("cudnn")
    if reason is None:
        assert refused is None
        return
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refused)


@pytest.mark.parametrize(("kind", "features", "reason"), [
    ("NVIDIA A100-SXM4-80GB", 128, None),
    ("NVIDIA H100 80GB HBM3", 256, None),
    ("NVIDIA B200", 136, r"at most 128 features here, got 136"),
    ("Tesla V100-SXM2-16GB", 64, r"capability 8.0 .* got .*\(7, 0\)"),
    ("AMD Instinct MI300X", 64, r"knows no compute capability of 'AMD Instinct MI300X'"),
])  # fmt: skip
def test_devices_elsewhere(monkeypatch, kind: str, features: int, reason: str | None) -> None:
    """The current device does not."""
    found = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=found)
    versions = SimpleNamespace(cudnn_get_version=lambda: 92000)
    monkeypatch.setattr(primitives, "cuda_versions", versions)
    with jax.sharding.use_abstract_mesh(mesh):
        refused = explain(*half(features=features), mask=Causal()).refused.get("cudnn")
    if reason is None:
        assert refused is None
        return
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refused)


def test_cudnn_inside_shard_map_needs_check_vma_false(nvidia) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    x = zeros((B, T, N, H), jnp.bfloat16)

    def call(q):
        return dot_product_attention(q, q, q, mask=Causal(), kernel="cudnn")

    unchecked = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    )
    np.testing.assert_array_equal(unchecked(x), 0)
    with pytest.raises(ValueError, match=r"inside jax.shard_map it needs check_vma=False"):
        jax.jit(jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows))(x)


def test_cudnn_on_mesh_without_rules_refuses(hopper) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        refused = explain(*half(heads=2), mask=Causal()).refused
    with pytest.raises(ValueError, match=r"no rule uses"):
        raise ValueError(refused["cudnn"])


@pytest.mark.parametrize(("t", "call", "chosen"), [
    (16, {"mask": Causal()}, "cudnn"),
    (8192, {"mask": Causal()}, "cudnn"),
    (2049, {"sinks": zeros(N)}, "cudnn"),
    (2049, {"mask": Prefix(3)}, "cudnn"),
    (2048, {"scores": (Alibi(),)}, "reference"),
    (2049, {"scores": (Alibi(),)}, "blockwise"),
    (32768, {"mask": Prefix(3)}, "blockwise"),
])  # fmt: skip
def test_auto_on_gpu_chooses_kernel(hopper, t: int, call: dict, chosen: str) -> None:
    assert explain(*half(t, t), **call).chosen == chosen


def test_auto_takes_cudnn_on_several_devices_without_mesh(hopper, monkeypatch) -> None:
    """XLA partitions the call as JAX directs it."""
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert explain(*half(), mask=Causal()).chosen == "cudnn"


def test_cudnn_refuses_other_platforms() -> None:
    x = zeros((B, T, N, H), jnp.bfloat16)
    call = functools.partial(dot_product_attention, x, x, x, kernel="cudnn")
    with pytest.raises(ValueError, match="runs on NVIDIA GPUs only, this is cpu"):
        call()
