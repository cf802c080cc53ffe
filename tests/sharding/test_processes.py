"""Shared heads and sharded slots over real processes, each equal to one device."""

from pathlib import Path

import pytest

from tests.sharding.head_process import cases
from tests.support import processes
from tests.support.meshes import BACKWARD


@pytest.mark.slow
def test_heads_and_slots_over_processes_match_one_device(tmp_path: Path) -> None:
    """Values and gradients of a layer, and a few steps of decoding with their cache."""
    names = {name for name, *_ in cases()}
    for told in processes.run_together("tests.sharding.head_process", 4, tmp_path / "logs"):
        assert told.keys() == names
        assert {name: error for name, error in told.items() if not error < BACKWARD} == {}
