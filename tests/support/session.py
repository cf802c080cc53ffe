"""One strict JAX for all tests: 8 CPU devices, no silent promotion, our warnings are errors."""

import gc
import importlib.util
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import experiments  # noqa: F401 — keeps libtpu quiet, where it is only a compiler
from flax_mha.cache import slots
from flax_mha.kernels.call import stored
from flax_mha.kernels.xla import decode, reference
from tests.support.draw import draw

# Collection makes no garbage, and looking for it takes a second.
gc.disable()
if importlib.util.find_spec("jax_cuda13_plugin") and not Path("/dev/nvidiactl").exists():
    # Only the compiler for NVIDIA GPUs is here: JAX would look for the rest of CUDA.
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# The seed of examples is TEST_DRAW, which `tests/conftest.py` hands to hypothesis. No example of an
# earlier run is stored, and no limit is of time: the same draw fails again. On CI machines,
# hypothesis would take one seed for ever.
settings.register_profile(
    "drawn", derandomize=False, database=None, print_blob=True, deadline=None, max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("drawn")

# The share of the tests marked as slow that a slow run takes.
OF_SLOW = 0.25

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
    """Mark the cases of sampled tests that are not of today's ordinary run, and a tenth of it.

    Cases that are in no run of today are left out, unless the marker expression names `grid`. If it
    names `slow`, so is a part of the cases that are marked so. If the command names a test, its
    cases all run.
    """
    seed, named = int(os.environ["TEST_DRAW"]), any("::" in name for name in config.args)
    kinds = ["sampled", "slow"] if "slow" in config.option.markexpr else ["sampled"]
    cases = defaultdict[tuple[str, str], list[pytest.Item]](list)
    for item in items:
        marked = [kind for kind in kinds if item.get_closest_marker(kind)]
        if marked and not named:
            cases[item.nodeid.partition("[")[0], marked[0]].append(item)
    left_out = set[pytest.Item]()
    for (name, kind), several in cases.items():
        marker = several[0].get_closest_marker(kind)
        (share,) = marker.args or (OF_SLOW,)
        fast, more = draw(several, share, seed, name)
        for item in {*several}.difference(fast):
            item.add_marker(pytest.mark.slow)
        left_out.update({*several}.difference(fast, more))
    if "grid" not in config.option.markexpr:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in draw([item for item in items if "slow" not in item.keywords], 0.1, seed, "")[0]:
        item.add_marker(pytest.mark.tenth)
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
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small blocks, so that few tokens fill several blocks of a cache and all paths run.

    Rows of queries are padded, and visited by blocks if they are many, as on TPUs.
    """
    monkeypatch.setattr(decode, "_BLOCK", {"cpu": 3})
    monkeypatch.setattr(decode, "_FEW", 0.5)
    monkeypatch.setattr(reference, "_ROWS", {"cpu": 8})
    monkeypatch.setattr(decode, "_MANY_ROWS", {"cpu": 16})
    # Calls of more tokens write a window of slots.
    monkeypatch.setattr(slots, "_FEW", 3)
    # Longer calls are prompts, which take the other kernels.
    monkeypatch.setattr(stored, "QUERIES", 5)
