"""The kernel for NVIDIA GPUs as lowered for XLA without a GPU, and run on one if present."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention, explain
from flax_mha.kernels.cudnn import primitives
from flax_mha.kernels.mesh import shards
from flax_mha.masks import Causal, Lengths, Prefix, Window
from tests.kernels.half_precision import run
from tests.kernels.oracle_check import B, N, arrays, check, table
from tests.support.meshes import on

T, S = 128, 192
LENGTHS = Lengths(jnp.array([150, 0]), jnp.array([128, 50]))


def lowered(call, *args) -> str:
    return jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


CALLS = {
    "plain": ({}, "PADDING", 0, ""),
    "causal": ({"mask": Causal()}, "PADDING_CAUSAL", 0, ""),
    "window": ({"mask": Window(10, 0) & LENGTHS}, "PADDING_CAUSAL", 11, ""),
    "lengths": ({"mask": LENGTHS}, "PADDING", 0, ""),
    "bias": ({"bias": jnp.zeros((N, T, S), jnp.bfloat16)}, "PADDING", 0, "ScaleBias"),
    "hidden pairs": ({"mask": Prefix(9)}, "PADDING", 0, "ScaleBias"),
}


@pytest.mark.sampled(0.42)
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", CALLS)
def test_cudnn_calls_have_native_arguments(hopper, monkeypatch, name: str, devices: int) -> None:
    """One forward and one backward call, under vmap too, without scores."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    call, mask, window, bias = CALLS[name]
    *qkv, _ = arrays(T, S, 2, "bfloat16")

    def loss(q, k, v):
        return run(q, k, v, **call)[0].sum(dtype=jnp.float32)

    for fn, *args in ((loss, *qkv), (jax.vmap(loss, (0, None, None)), qkv[0][None], *qkv[1:])):
        text = lowered(jax.grad(lambda *x, fn=fn: fn(*x).sum(), (0, 1, 2)), *args)
        calls = re.findall(r"__cudnn\$(\w+)", text)
        assert calls == [f"fmha{bias}Softmax", f"fmha{bias}SoftmaxBackward"]
        settings = {
            key: set(re.findall(rf"{key}\\22: (?:\\22)?(\w+)", text))
            for key in ("mask_type", "sliding_window_length", "max_seg_per_batch", "fmha_scale")
        }
        assert settings.pop("fmha_scale") == {"0"}
        assert settings == {
            "mask_type": {mask}, "sliding_window_length": {str(window)},
            "max_seg_per_batch": {"1"},
        }  # fmt: skip
        assert bool(re.search(rf"{T}x{S}x", text)) == bool(bias)
        assert not re.search(r"stablehlo\.(while|case|if)\b", text)


def test_lse_gradient_takes_a_second_backward_call(hopper) -> None:
    *qkv, _ = arrays(T, S, 2, "bfloat16")
    text = lowered(
        jax.grad(lambda *x: sum(y.sum(dtype=jnp.float32) for y in run(*x)), (0, 1, 2)), *qkv
    )
    assert len(re.findall(r"__cudnn\$(\w+)", text)) == 3


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_each_device_of_mesh_calls_cudnn(hopper) -> None:
    *qkv, _ = arrays(T, S, 2, "bfloat16")
    with on("Auto", shape=(2, 2)):
        text = lowered(lambda *x: run(*x, mask=Causal())[0], *qkv)
    (call,) = re.findall(r"__cudnn\$fmhaSoftmax.*", text)
    assert f"tensor<{B // 2}x{T}x{N // 2}x" in call


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [-120.0, 120.0])
@pytest.mark.parametrize("s", [64, 192, 256, 1000])
def test_very_small_scores_on_gpu_match_oracle(shift: float, s: int) -> None:
    """All scores are near −120, where exp(0 − lse) overflows."""
    q, k, v, cotangent = arrays(s, s, 2, "bfloat16")
    # A feature that all keys share cancels in dq, up to the rounding of the scores' gradients.
    q, k = q.at[..., 0].set(shift), (k * 0.5).at[..., 0].set(1.0)
    known = {"scale": 1.0, "allowed": table(Causal(), s, s)}
    call = {"scale": 1.0, "mask": Causal()}
    check([q, k, v, cotangent], known, call, {})


@pytest.mark.gpu
def test_auto_takes_cudnn_on_gpu() -> None:
    assert not isinstance(primitives.gpu(shards.current_platform()), str)
    x = jnp.ones((2, 4096, 4, 64), jnp.bfloat16)
    assert explain(x, x, x, mask=Causal()).chosen == "cudnn"
    assert np.isfinite(dot_product_attention(x, x, x, mask=Causal())).all()
