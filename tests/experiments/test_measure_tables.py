"""The tables that `measure` writes or compiles for docs."""

import re

import jax
import pytest

from experiments.measure import __main__ as measure
from experiments.measure import features, registers
from experiments.measure.features import KERNELS
from experiments.plan import gpus
from experiments.runs.failures import RunError
from flax_mha.kernels import Platform
from flax_mha.kernels.flex import hopper


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="this JAX's cuDNN has no soft caps")
def test_page_equals_generated_table() -> None:
    text = features.PAGE.read_text()
    assert features.page(text) == text, "run python -m experiments.measure features"


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_described_on_the_page(name: str) -> None:
    assert features.homes()[name]
    page = features.PAGE.with_name("kernels.md").read_text()
    assert re.search(rf"^- `{name}`:", page, re.MULTILINE)


def test_reference_refuses_nothing() -> None:
    assert not any(features.refusals("reference", Platform("cpu")).values())


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
