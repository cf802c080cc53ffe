"""What tests of kernels share."""

from collections.abc import Iterator

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_mha.kernels import flex, splash


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One device that says it is a TPU, where Pallas is interpreted; blocks of 128.

    Of our own kernel TPUs' memory is interpreted too, and no two accesses may race.
    """
    real = pl.pallas_call
    ours = pltpu.InterpretParams(detect_races=True)

    def call(*args, **kwargs):
        flexible = (kwargs.get("name") or "").startswith("flex")
        return real(*args, **{**kwargs, "interpret": ours if flexible else True})

    monkeypatch.setattr(pl, "pallas_call", call)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(splash, "BLOCKS", {128: 128})
    monkeypatch.setattr(flex, "BLOCKS", {128: 128})
    monkeypatch.setattr(interpreter, "races", None)
    yield
    assert interpreter.races is None or not interpreter.races.races_found
