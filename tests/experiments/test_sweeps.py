"""The measurement of sweeps, on a small model."""

import pytest

from experiments.measure import sweeps
from flax_mha.edits import Edit


@pytest.mark.slow
def test_the_tables_have_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "LAYERS", 2)
    monkeypatch.setattr(sweeps, "HEADS", 2)
    monkeypatch.setattr(sweeps, "BATCHES", (1, 2))
    cells = sweeps.race(8, 8, 1).strip("| ").split(" | ")
    assert cells[:2] == ["8", "8"]
    assert len(cells) == 6
    assert all(float(cell.split()[0]) > 0 for cell in cells[3:5])  # times are rounded
    assert sweeps.memory({"attention_weights": Edit(0.5)}) > sweeps.memory({}) + 500
