"""What tests of kernels share."""

import jax
import pytest
from jax.experimental import pallas as pl

from flax_mha.kernels import fused, splash
from tests.kernels import cudnn_model


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


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device that says it is a GPU with a recent cuDNN; its primitives are not replaced."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(fused, "gpu", lambda: fused.Gpu((9, 0), (9, 20, 0)))


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    """Such a device, where a model stands in for cuDNN."""
    monkeypatch.setattr(fused.fused, "_dot_product_attention_fwd_impl", cudnn_model.forward)
    monkeypatch.setattr(fused.fused, "_dot_product_attention_bwd_impl", cudnn_model.backward)
