"""Fixtures that stand in for accelerators in tests of kernels."""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax._src import callback as callbacks
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from flax_mha.kernels.chips import gpus
from flax_mha.kernels.chips import tpus as blocks
from flax_mha.kernels.cudnn import edge_cases, primitives
from flax_mha.kernels.flex import passes
from flax_mha.kernels.flex.hopper import LACKING
from flax_mha.kernels.flex.tpu import whole_rows
from tests.kernels import cudnn_model
from tests.support.platforms import pretend


@pytest.fixture
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo `trees.trace_once`, so that tests that compile these do not find traces made here."""
    for module, *names in (
        (passes, "_attend", "_gradients"),
        (whole_rows, "_forward", "_backward"),
        (edge_cases, "_attend_keys", "_gradients"),
    ):  # fmt: skip
        for name in names:
            fn = getattr(module, name)
            monkeypatch.setattr(module, name, getattr(fn, "__wrapped__", fn))


@pytest.fixture
def tokens_on_devices() -> Iterator[None]:
    """Shard tokens over a mesh of two devices."""
    rules = (("length", "model"), ("heads", None), ("kv_heads", None), ("batch", None))
    # Not by `tests.support.meshes`: its arrays would start JAX before the session is set up.
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield


@pytest.fixture
def tpu(sharing_tpu: None, traced_anew: None) -> None:
    """Run as `sharing_tpu`, at any lengths."""


@pytest.fixture
def sharing_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the one device report itself as a TPU, with Pallas interpreted and blocks of 128.

    Calls share traces, so a test takes lengths that no other has.
    """
    _interpret(monkeypatch, True)
    pretend(monkeypatch, "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(blocks, "BLOCKS", {128: 128})
    monkeypatch.setattr(blocks, "memory", lambda device: 2**27)


@pytest.fixture
def compiling_for_tpu(monkeypatch: pytest.MonkeyPatch, optimized: None) -> None:
    """Choose kernels as on a TPU, for its compiler."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.fixture
def tpu_memory(tpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run as `tpu` with its memories and copies, and check that no two race. Slow."""
    _interpret(monkeypatch, pltpu.InterpretParams(detect_races=True))
    monkeypatch.setattr(interpreter, "races", None)
    yield
    assert interpreter.races is not None
    assert not interpreter.races.races_found


def _interpret(monkeypatch: pytest.MonkeyPatch, how: object) -> None:
    real = getattr(pl.pallas_call, "real", pl.pallas_call)

    @functools.wraps(real)
    def call(*args, **kwargs):
        return real(*args, **{**kwargs, "interpret": how})

    call.real = real
    monkeypatch.setattr(pl, "pallas_call", call)


@pytest.fixture
def hopper_memory(monkeypatch: pytest.MonkeyPatch, traced_anew: None) -> Iterator[None]:
    """Make the one device report itself as a Hopper GPU, with Mosaic GPU's kernels interpreted.

    A race raises an error.
    """
    if LACKING:
        pytest.skip(LACKING)
    mosaic = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    how = mosaic.InterpretGPUParams(detect_races=True, on_race="raise")
    monkeypatch.setattr(mosaic, "kernel", functools.partial(mosaic.kernel, interpret=how))
    monkeypatch.setattr(callbacks, "io_callback_impl", _call_back)
    sync = importlib.import_module("flax_mha.kernels.flex.hopper.sync")
    # The interpreter has no rule for an accumulator that does not start at 0.
    monkeypatch.setattr(sync, "multiply", functools.partial(_sum_of_product, sync.multiply))
    pretend(monkeypatch, "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    yield
    package = "jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks"
    importlib.import_module(package).reset_gpu_interpret_mode_state()


def _call_back(*args: Any, callback: Any, **_: Any) -> list[np.ndarray]:
    """Call an interpreter's function of a memory or barrier with numbers of NumPy and Python.

    JAX makes an array on a device of each argument, which takes two thirds of a kernel's time.
    """
    given = (x.item() if x.shape == () and x.dtype == np.int32 else np.array(x) for x in args)
    return [np.asarray(x) for x in callback(*given)]


def _sum_of_product(multiply: Any, a: Any, b: Any, start: Any = None) -> jax.Array:
    return multiply(a, b) if start is None else start + multiply(a, b)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, traced_anew: None) -> None:
    """Make the one device report itself as a GPU with a recent cuDNN. Primitives are not
    replaced.
    """
    pretend(monkeypatch, "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(primitives, "gpu", lambda platform: ((9, 0), (9, 20, 0)))


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    """Run as `hopper` with a model in place of cuDNN."""
    monkeypatch.setattr(primitives, "_dot_product_attention_fwd_impl", cudnn_model.forward)
    monkeypatch.setattr(primitives, "_dot_product_attention_bwd_impl", cudnn_model.backward)
