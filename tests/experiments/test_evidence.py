"""The commands behind docs/performance.md: losses of all kernels, and costs by length."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.measure import lengths, losses
from experiments.measure.__main__ import main


@jax.numpy_dtype_promotion("standard")
@pytest.mark.sampled(0)
def test_losses_of_all_kernels_and_meshes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(losses, "MESHES", {"tokens over 2": {"data": -1, "context": 2}})
    monkeypatch.setattr(losses, "STEPS", 2)
    main(["losses", "--devices=8", f"--workdir={tmp_path}"])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    found = {row["computed by"]: row["losses"] for row in rows}
    first = found["reference, float32"]
    assert len(first) == 2
    for name, others in found.items():
        bound = 0.02 if "bfloat16" in name else 1e-4
        assert max(abs(a - b) for a, b in zip(first, others, strict=True)) < bound, name
    assert {"blockwise, float32", "blockwise, bfloat16", "tokens over 2"} <= found.keys()
    assert (tmp_path / "losses.png").stat().st_size > 10_000


# Flax's layers and norms promote implicitly.
@jax.numpy_dtype_promotion("standard")
@pytest.mark.sampled(0)
def test_costs_by_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "LENGTHS", (1024, 2048))
    monkeypatch.setattr(lengths, "KERNELS", {"tpu": ("auto", "reference")})
    main(["lengths", "--chip=v5e", f"--workdir={tmp_path}"])
    short, long = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (short["tokens"], long["tokens"]) == (1024, 2048)
    assert {*long} == {"tokens", "auto", "reference", "Flax"}
    assert long["auto"]["MiB"] < long["reference"]["MiB"]
    # A kernel's memory does not grow with the square of the length.
    assert long["auto"]["held"] < 4
    assert (tmp_path / "lengths.png").exists()
