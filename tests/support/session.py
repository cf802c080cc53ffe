"""One strict JAX for all tests: 8 CPU devices, no silent promotion, our warnings are errors."""

import gc
import importlib.util
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import settings

import experiments  # noqa: F401 — keeps libtpu quiet, where it is only a compiler
from flax_mha.kernels import decode

# Collection makes no garbage, and looking for it takes a second.
gc.disable()
if importlib.util.find_spec("jax_cuda13_plugin") and not Path("/dev/nvidiactl").exists():
    # Only the compiler for NVIDIA GPUs is here: JAX would look for the rest of CUDA.
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Every run tries the same examples: a failure is a fact, not a matter of luck.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("repeatable")


make_mesh = jax.make_mesh


def _mesh_or_skip(shape: tuple[int, ...], *args: Any, **kwargs: Any) -> jax.sharding.Mesh:
    """Make a mesh, or skip the test: accelerators may be fewer than the 8 devices of a CPU."""
    there = len(kwargs.get("devices") or jax.devices())
    if math.prod(shape) > there:
        pytest.skip(f"needs {math.prod(shape)} devices, got {there}")
    return make_mesh(shape, *args, **kwargs)


# Before pytest itself deselects slow tests.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark most cases of sampled tests as slow, and skip tests without their accelerator.

    Of those, all beyond the share `slow` are left out, unless the marker expression names `grid`.
    """
    left_out = set[pytest.Item]()
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, several in cases.items():
        marker = several[0].get_closest_marker("sampled")
        # The same in every run, and spread over the factors of a table.
        kept = random.Random(name).sample(several, math.ceil(len(several) * marker.args[0]))
        others = [item for item in several if item not in kept]
        count = math.ceil(len(others) * marker.kwargs.get("slow", 0.3))
        for item in others:
            item.add_marker(pytest.mark.slow)
        left_out |= {*others} - {*random.Random(name).sample(others, count)}
    if "grid" not in config.option.markexpr:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    platform = jax.default_backend()
    for item in items:
        for needed in ("gpu", "tpu"):
            if needed in item.keywords and platform != needed:
                item.add_marker(pytest.mark.skip(reason=f"needs a {needed.upper()}"))
    if jax.device_count() < 8:
        jax.make_mesh = _mesh_or_skip


def pytest_collection_finish() -> None:
    """Set garbage collection to run seldom, and to ignore the loaded modules."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make a test draw the same numbers alone, among others, and on any worker.

    For some numbers a gradient is a sum that cancels to nearly nothing. Its relative error is large
    in any implementation: a failure that would come and go with the order of the tests.
    """
    rng = getattr(getattr(item, "module", None), "RNG", None)
    if rng is not None:
        rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def optimized() -> Iterator[None]:
    """Run the test with XLA's optimizations, as users do."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small blocks, so that few tokens fill several blocks of a cache and both paths run."""
    monkeypatch.setattr(decode, "_BLOCK", {"cpu": 3})
    monkeypatch.setattr(decode, "_FEW", 0.5)
    # Longer calls are prompts, which take the other kernels.
    monkeypatch.setattr(decode, "QUERIES", 5)
