"""The command that tells where bits do not depend on the rest of the batch."""

from pathlib import Path

import pytest

from experiments.measure import bits
from experiments.measure.__main__ import main


@pytest.mark.slow
def test_command_compares_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits.machine, "kernels", lambda: ["blockwise"])
    monkeypatch.setattr(bits, "DTYPES", ("float32",))
    main(["bits", f"--workdir={tmp_path}"])
    table = (tmp_path / "table.md").read_text()
    assert "| attention, neighbors | equal |" in table
    assert "| layer, step |" in table
