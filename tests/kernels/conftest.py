"""What tests of kernels share."""

import jax
import pytest
from jax.experimental import pallas as pl

from flax_mha.kernels import splash


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
