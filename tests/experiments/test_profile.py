"""Profiler traces name the parts of the layer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.common.failures import RunError
from experiments.runs import progress

ROOT = Path(__file__).parent.parent.parent
STEPS = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from experiments.runs import progress
from flax_mha import MultiHeadAttention
from flax_mha.positions import Rotary

layer, x = MultiHeadAttention(num_heads=2, rotary=Rotary()), jnp.ones((2, 8, 16))
variables = layer.init(jax.random.key(0), x)
step = jax.jit(layer.apply)
with progress.tracing(Path(sys.argv[1]), "2:3") as trace:
    for i in range(1, 6):
        trace(i)
        step(variables, x).block_until_ready()
"""


@pytest.mark.slow
def test_trace_of_steps_names_the_parts_of_the_layer(tmp_path: Path) -> None:
    # In a subprocess, on the CPU only: a libtpu newer than jaxlib crashes the profiler.
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    assert done.stdout == f"traced steps 2 to 3: {tmp_path}\n"
    (found,) = tmp_path.rglob("*.xplane.pb")
    # It contains the programs that ran, with the scope of each operation.
    for scope in (b"project", b"rotate", b"kernel", b"merge"):
        assert b"/" + scope + b"/" in found.read_bytes()
    assert list(tmp_path.rglob("perfetto_trace.json.gz"))


@pytest.mark.parametrize("said", ["5", "5:4", "0:3", "1:2:3"])
def test_invalid_profile_flags_raise(said: str) -> None:
    with pytest.raises(RunError, match="--profile must be FIRST:LAST"):
        progress.parse_steps(said)
