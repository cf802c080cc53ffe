"""The table of docs/kernels.md, which `measure features` writes."""

import re

import jax
import pytest

from experiments.measure import features
from experiments.measure.features import KERNELS
from flax_mha.kernels import Platform


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="this JAX's cuDNN has no soft caps")
def test_page_equals_generated_table() -> None:
    text = features.PAGE.read_text()
    assert features.page(text) == text, "run python -m experiments.measure features"


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_described_on_the_page(name: str) -> None:
    assert name in {kernel for kernel, _ in features.columns().values()}
    assert re.search(rf"^- `{name}`:", features.PAGE.read_text(), re.MULTILINE)


def test_reference_refuses_nothing() -> None:
    calls = {**features.features(), **features.DERIVATIVES}
    assert not any(features.refusals("reference", Platform("cpu"), calls).values())
