"""The memory of loading, in fresh processes: the pages of mapped files don't count."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from flax_mha import interop
from tests.experiments.launch import free_address
from tests.interop.test_files import CONFIG

ROOT = Path(__file__).parent.parent.parent
DEVICES = 8
PATIENCE = 240  # seconds
LARGE = CONFIG | {"vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 8192}
EXPERTS = CONFIG | {
    "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 1,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def written(folder: Path, config: dict[str, Any], dtype: Any) -> Path:
    """Save a model of this config, and inside it a small one of the same family."""
    small = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 16)
    rng = np.random.default_rng(0)
    for path, sizes in ((folder, config), (folder / "small", config | small)):
        family = interop.family(sizes)
        shapes = jax.eval_shape(family.module.init, jax.random.key(0), *family.example)
        values = jax.tree.map(
            lambda x: rng.standard_normal(x.shape, np.float32).astype(dtype), shapes
        )
        interop.save(sizes, values, path)
    return folder


def start(*arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "tests.interop.loader", *arguments],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def results(*processes: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Wait for the processes, and return the last line of each."""
    try:
        told = [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, told, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


FOLDERS = {
    "large": (LARGE, np.float32),
    "large, bfloat16": (LARGE, ml_dtypes.bfloat16),
    "experts": (EXPERTS, ml_dtypes.bfloat16),
}
# A folder, which is only read, and the arguments of the loader.
CASES = {
    "rows": ("large", "", "0"),
    "columns, cast down": ("large", "bfloat16", "1"),
    "NumPy": ("large", "", ""),
    "rows, cast up": ("large, bfloat16", "float32", "0"),
    "columns, cast up": ("large, bfloat16", "float32", "1"),
    "NumPy, bfloat16": ("large, bfloat16", "", ""),
    "NumPy, cast up": ("large, bfloat16", "float32", ""),
    "experts, cast up": ("experts", "float32", "0"),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a folder of that name at its first call."""
    return functools.cache(lambda name: written(tmp_path_factory.mktemp("x"), *FOLDERS[name]))


@pytest.mark.sampled(0)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", CASES)
def test_loading_holds_little_beyond_the_result(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    folder, *arguments = CASES[name]
    (memory,) = results(start(str(folder_of(folder)), *arguments))
    print(name, memory["held"] / 2**20, memory["beyond"] / 2**20)
    assert memory["held"] >= 2**27
    assert memory["beyond"] <= (2**25 if arguments[1] else 0.05 * memory["held"])


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["0", "1"])
def test_two_hosts_get_half_each(axis: str, tmp_path: Path) -> None:
    """Over a mesh of both, straight into shards. Every device has the unsharded arrays."""
    config = CONFIG | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
    folder = written(tmp_path, config, np.float32)
    address = free_address()
    both = results(*(start(str(folder), "", axis, address, str(i)) for i in range(2)))
    variables = jax.tree.leaves(interop.load(folder)[1])
    is_sharded = [x.ndim > 1 and x.shape[int(axis)] % (2 * DEVICES) == 0 for x in variables]
    held = [
        x.nbytes // 2 if sharded else DEVICES * x.nbytes
        for x, sharded in zip(variables, is_sharded, strict=True)
    ]
    for report in both:
        assert report["held"] == sum(held)
        np.testing.assert_allclose(
            report["sums"], [np.square(x.astype(np.float64)).sum() for x in variables], rtol=1e-5
        )
