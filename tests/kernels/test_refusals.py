"""Calls that the kernels for accelerators refuse, their reasons, and the choice of auto."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import dot_product_attention, explain
from flax_mha.kernels.cudnn import primitives
from flax_mha.kernels.flex import tpu as machine
from flax_mha.masks import Causal, Dense, Lengths, PerHead, Predicate, Prefix, Segments, Window
from flax_mha.scores import Alibi, Bias, Score, SoftCap
from tests.repository.test_kernel_table import traced
from tests.support.arrays import zeros
from tests.support.meshes import on

B, T, S, N, H = 2, 280, 300, 4, 8
# The fixture that stands in for each kernel's platform, and a dtype that the kernel takes.
PLATFORMS = {
    "cudnn": ("hopper", "bfloat16"), "flex": ("tpu", "float32"), "splash": ("tpu", "float32"),
}  # fmt: skip
HALF = zeros((T, S), jnp.bfloat16)
DROPOUT = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
PACKED = Segments(zeros((B, T), int), zeros((B, S), int))
TABLE = Dense(np.kron(np.eye(28, 30), np.ones((10, 10))) > 0)


class Doubled(Bias):
    """A subclass with another meaning."""


class Squashed(SoftCap):
    """A subclass with another meaning."""


class Reversed(Segments):
    """A subclass with another meaning."""


def scored(fn: Any, *args: Any) -> dict[str, Any]:
    return {"scores": (Score(fn, args),)}


# JAX's arrays are traced. Sizes and dtypes are named by the letters of `sizes` below.
REFUSED: dict[str, dict[str, dict[str, Any]]] = {
    "cudnn": {
        r"float16 and bfloat16, got float32": {"dtype": "float32"},
        r"no rows, queries or keys": {"S": 0},
        r"no gradient of one query and one key": {"T": 1, "S": 1},
        r"at most 256 features here, got 264": {"H": 257},
        r"no dropout": DROPOUT,
        r"no precision setting, got highest": {"precision": "highest"},
        r"one Bias only, got Alibi": {"scores": (Alibi(),)},
        r"one Bias only, got Bias, Bias": {"scores": (Bias(HALF),), "bias": HALF},
        r"one Bias only, got Doubled": {"scores": (Doubled(HALF),)},
        r"got float32 to bfloat16": {"bias": zeros((T, S))},
        r"got float16 to float16": {"bias": HALF.astype("float16"), "dtype": "float16"},
        r"bias of \(1, 300\) .* T·S = 280·300": {"bias": HALF[0]},
        r"hides pairs of Or by a bfloat16 bias, got float16": {
            "mask": Causal() & Prefix(3), "dtype": "float16",
        },
        r"pairs of Or by a bias of 2,147,549,184 bytes, more than 1,073,741,824": {
            "mask": Prefix(3), "T": 2**15 + 1, "S": 2**15,
        },
    },
    "flex": {
        r"float32 and bfloat16, got float16": {"dtype": "float16"},
        r"no rows, queries or keys": {"T": 0},
        r"at most 128 features, got 136": {"H": 136},
        r"precisions default, high and highest, got BF16": {"precision": "BF16_BF16_F32"},
        r"at most 20 tiles, T·S = 3000·300 need more": {"T": 3000},
        r"lacks an operation of a mask or a score: sort": scored(lambda s, *_: jnp.sort(s)),
        r"score: dot_general": scored(lambda s, *_: s @ jnp.eye(s.shape[-1])),
        r"score: cumsum": scored(lambda s, *_: s + jnp.cumsum(s, 0)),
        r"score: convert_element_type to float16": scored(
            lambda s, *_: s.astype(jnp.float16).astype(s.dtype)
        ),
        r"score: gather from 300 entries, of more than 256,": scored(
            lambda s, b, n, i, j, t: s + t[j], zeros(300)
        ),
        r"score: gather": scored(lambda s, b, n, i, j, t: s + t[n].sum(-1), zeros((N, 3))),
        r"of at most two axes and \d+ entries, got \(2, 2, 2\)": scored(
            lambda s, *_: s, zeros((2, 2, 2))
        ),
        r"of at most two axes and 131072 entries, got \(512, 512\)": scored(
            lambda s, *_: s, zeros((512, 512))
        ),
        r"closes over arrays it can't load: float16\[3\]": scored(
            lambda s, *_: s + jnp.sum(jnp.asarray(np.ones(3, np.float16))).astype(s.dtype)
        ),
        r"score: scan": {
            "mask": Predicate(lambda b, n, i, j: jax.lax.map(lambda x: x > 3, j)),
        },
    },
    "splash": {
        r"Reversed holds arrays": {"mask": Reversed(np.zeros(T, int), PACKED.kv)},
        r"one SoftCap only, got Squashed": {"scores": (Squashed(2.0),)},
        r"float32 and bfloat16, got float16": {"dtype": "float16"},
        r"no rows, queries or keys": {"B": 0},
        r"at most 128 features, got 136": {"H": 136},
        r"no dropout": DROPOUT,
        r"no precision setting, got highest": {"precision": "highest"},
        r"one SoftCap only, got SoftCap, Bias": {"scores": (SoftCap(2.0),), "bias": zeros(S)},
        r"Dense holds arrays that are not NumPy's": {"mask": zeros((T, S), bool)},
        r"TracedNumbers holds arrays": {"mask": zeros(S)},
        r"Lengths holds arrays": {"mask": Lengths(zeros((B, T), int)) & Causal()},
        r"Or holds arrays": {"mask": Causal() | PACKED},
        r"one mask .*, got Predicate": {"mask": Predicate(lambda b, n, i, j: j <= i + b)},
        r"one mask .*, got PerHead": {"mask": PerHead([Causal(), Window(1)] * 2)},
        r"Dense holds arrays, which the kernel can't load": {"mask": TABLE},
        r"ids from one mask, got Segments, Lengths": {"mask": PACKED & Lengths(zeros(B, int))},
        r"has no sinks": {"sinks": zeros(N)},
        r"returns no lse": {"return_residuals": True},
        r"kv_positions do not count up": {
            "mask": Causal(), "kv_positions": 2 * np.arange(S),
        },
        r"q_positions are not NumPy's": {"mask": Causal(), "q_positions": zeros(T, int)},
        r"kv_positions differ between rows": {
            "mask": Causal(), "kv_positions": np.zeros((B, S), int),
        },
    },
}  # fmt: skip


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize(("kernel", "reason"), [(x, y) for x in REFUSED for y in REFUSED[x]])
def test_kernels_refuse_with_reason(
    kernel: str, reason: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both functions give the same reason, and auto takes another kernel."""
    fixture, dtype = PLATFORMS[kernel]
    request.getfixturevalue(fixture)
    monkeypatch.setattr(machine, "MACHINE", machine.MACHINE._replace(table=20))
    sizes = {"B": B, "T": T, "S": S, "H": H, "dtype": dtype}
    call = dict(REFUSED[kernel][reason])
    sizes |= {name: call.pop(name) for name in sizes if name in call}
    q, k = (
        zeros((sizes["B"], sizes[length], N, sizes["H"]), jnp.dtype(sizes["dtype"]))
        for length in "TS"
    )
    assert traced(functools.partial(explain, q, k, k), call).chosen != kernel
    with pytest.raises(ValueError, match=f"can't run this call: .*{reason}"):
        traced(functools.partial(dot_product_attention, q, k, k, kernel=kernel), call)


@pytest.mark.parametrize("kernel", PLATFORMS)
def test_kernels_inside_shard_map_need_check_vma_false(
    kernel: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(PLATFORMS[kernel][0].replace("hopper", "nvidia"))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    x = jax.ShapeDtypeStruct((B, T, N, H), PLATFORMS[kernel][1])

    def run(**checks: Any) -> None:
        def call(q: jax.Array) -> jax.Array:
            return dot_product_attention(q, q, q, mask=Causal(), kernel=kernel)

        jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows, **checks), x)

    run(check_vma=False)
    with pytest.raises(ValueError, match=r"inside jax.shard_map it needs check_vma=False"):
        run()


def half(t: int = T, s: int = T, features: int = H, heads: int = N) -> list[Any]:
    kv = jax.ShapeDtypeStruct((B, s, heads, features), jnp.bfloat16)
    return [jax.ShapeDtypeStruct((B, t, N, features), jnp.bfloat16), kv, kv]


@pytest.mark.parametrize("kernel", PLATFORMS)
def test_meshes_need_rules_and_several_devices_a_mesh(
    kernel: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA partitions cuDNN calls by rules of JAX."""
    request.getfixturevalue(PLATFORMS[kernel][0])
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    refused = explain(*half(), mask=Causal()).refused.get(kernel, "")
    words = "between the 8 devices by itself; wrap in `with jax.set"
    assert (words in refused) == (kernel != "cudnn")
    with on("Auto", ()):
        assert "no rule uses" in explain(*half(heads=2), mask=Causal()).refused[kernel]


@pytest.mark.parametrize(("kernel", "platform", "rule"), [
    ("cudnn", "cpu", "NVIDIA GPUs"), ("flex", "cpu", "TPU and NVIDIA GPUs"),
    ("flex", "gpu", "NVIDIA GPUs"),
])  # fmt: skip
def test_kernels_refuse_other_platforms(monkeypatch, kernel: str, platform: str, rule: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    x = zeros((B, T, N, H), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"(runs on {rule} only, this is cpu|needs JAX 0.12)"):
        dot_product_attention(x, x, x, kernel=kernel)


@pytest.mark.parametrize(
    "mask", [PerHead([Causal(), Window(1)] * 2), Predicate(lambda b, n, i, j: j <= i + b)]
)
def test_splash_refuses_masks_that_differ_between_devices(tpu, mask) -> None:
    """A device has one row and one head, with the same mask as far as it sees."""
    with on("Auto", shape=(B, N)):
        refused = explain(*half(), mask=mask).refused["splash"]
        assert "takes one mask for all rows and heads" in refused
        assert "splash" not in explain(*half(), mask=Causal()).refused


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
    (device("9.0"), 91002, 256, None),
    (device("12.0"), 92301, 128, None),
    # Devices of the mesh, whatever the current device is.
    ("NVIDIA A100-SXM4-80GB", 92000, 128, None),
    ("NVIDIA H100 80GB HBM3", 92000, 256, None),
    ("NVIDIA B200", 92000, 136, r"at most 128 features here, got 136"),
    ("AMD Instinct MI300X", 92000, 64, r"no compute capability of 'AMD Instinct MI300X'"),
])  # fmt: skip
def test_devices_that_cudnn_refuses(
    monkeypatch, found: Any, cudnn: int | None, features: int, reason: str | None
) -> None:
    versions = cudnn and SimpleNamespace(cudnn_get_version=lambda: cudnn)
    monkeypatch.setattr(primitives, "cuda_versions", versions)
    elsewhere = None
    if isinstance(found, str):
        elsewhere = jax.sharding.AbstractDevice(device_kind=found, num_cores=132, platform="gpu")
    else:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda: [found])
    mesh = jax.sharding.AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=elsewhere)
    with jax.sharding.use_abstract_mesh(mesh):
        refused = explain(*half(features=features), mask=Causal()).refused.get("cudnn")
    if reason is None:
        assert refused is None
        return
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refused)


@pytest.mark.parametrize(("device", "t", "call", "chosen"), [
    ("hopper", 16, {"mask": Causal()}, "cudnn"),
    ("hopper", 2049, {"sinks": zeros(N)}, "cudnn"),
    ("hopper", 2049, {"mask": Prefix(3)}, "cudnn"),
    ("hopper", 2048, {"scores": (Alibi(),)}, "reference"),
    ("hopper", 2049, {"scores": (Alibi(),)}, "blockwise"),
    ("hopper", 32768, {"mask": Prefix(3)}, "blockwise"),
    ("tpu", 4096, {"mask": Causal(), "scores": (Alibi(),)}, "flex"),
    ("tpu", 4096, {"precision": "BF16_BF16_F32"}, "blockwise"),
    ("tpu", 256, {"scores": (Alibi(),)}, "short"),
])  # fmt: skip
def test_auto_chooses(
    device: str, t: int, call: dict[str, Any], chosen: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(device)
    assert explain(*half(t, t), **call).chosen == chosen
