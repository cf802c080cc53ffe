"""The page of kernels agrees with the kernels."""

import re

import jax
import pytest

from experiments import flex_registers, kernels_memory, kernels_table
from experiments.kernels_table import KERNELS
from experiments.plan import gpus
from experiments.runs.failures import RunError
from flax_mha.base import private_jax
from flax_mha.kernels import Platform


@pytest.mark.sampled(0, slow=0.34)
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="this JAX's cuDNN has no soft caps")
def test_page_equals_generated_table() -> None:
    text = kernels_table.PAGE.read_text()
    assert kernels_table.page(text) == text, "run python -m experiments.kernels_table"


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_described_on_the_page(name: str) -> None:
    assert kernels_table.homes()[name]
    page = kernels_table.PAGE.with_name("kernels.md").read_text()
    assert re.search(rf"^- `{name}`:", page, re.MULTILINE)


def test_reference_refuses_nothing() -> None:
    assert not any(kernels_table.refusals("reference", Platform("cpu")).values())


def test_gpu_memory_table_names_missing_wheels(monkeypatch) -> None:
    monkeypatch.setattr(gpus, "lacking", lambda: "needs the wheels")
    with pytest.raises(RunError, match=r"needs the wheels.*pip install .*gpu-compile"):
        kernels_memory.main([])


def test_registers_table_names_missing_compiler(monkeypatch) -> None:
    monkeypatch.setattr(flex_registers, "_ptxas", lambda: None)
    with pytest.raises(RunError, match="needs ptxas; pip install"):
        flex_registers.main([])


@pytest.mark.skipif(private_jax.missing("flex.hopper") is not None, reason="needs Mosaic GPU")
def test_registers_table_has_the_limits_of_a_kernel() -> None:
    """989 teraflops, 2 matmuls of 2·64 operations per score; 16 exponentials on 132 cores."""
    from flax_mha.kernels.flex.hopper.block import Size

    found = flex_registers.Found("forward", 8, 2**17, Size(128, 3))
    cells = flex_registers.line(found, 64).split(" | ")
    assert cells[:2] == ["| `forward`", "64"]
    assert cells[3:5] == ["8", "128 KiB"]
    assert cells[5] == "128 × 3"
    assert cells[6] == f"{989e12 / (4 * 64) / 1e9:,.0f}"
    assert cells[8] == f"{16 * 132 * 1.98:,.0f} |"
