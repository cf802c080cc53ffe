"""The tables that `measure` writes or compiles for docs."""

import pytest

from experiments.measure import __main__ as measure
from experiments.measure import registers
from experiments.plan import gpus
from experiments.runs.failures import RunError
from flax_mha.kernels.flex import hopper


def test_gpu_memory_table_names_missing_wheels(monkeypatch) -> None:
    monkeypatch.setattr(gpus, "lacking", lambda: "needs the wheels")
    with pytest.raises(RunError, match=r"needs the wheels.*pip install .*gpu-compile"):
        measure.main(["memory"])


def test_registers_table_names_missing_compiler(monkeypatch) -> None:
    monkeypatch.setattr(registers, "_ptxas", lambda: None)
    with pytest.raises(RunError, match="needs ptxas; pip install"):
        measure.main(["registers"])


@pytest.mark.skipif(hopper.LACKING is not None, reason="needs Mosaic GPU")
def test_registers_table_has_the_limits_of_a_kernel() -> None:
    """989 teraflops, 2 matmuls of 2·64 operations per score; 16 exponentials on 132 cores."""
    from flax_mha.kernels.flex.hopper.block import Size

    found = registers.Found("forward", 8, 2**17, Size(128, 3))
    cells = registers.line(found, 64).split(" | ")
    assert cells[:2] == ["| `forward`", "64"]
    assert cells[3:5] == ["8", "128 KiB"]
    assert cells[5] == "128 × 3"
    assert cells[6] == f"{989e12 / (4 * 64) / 1e9:,.0f}"
    assert cells[8] == f"{16 * 132 * 1.98:,.0f} |"
