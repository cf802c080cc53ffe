"""The command that tells where bits do not depend on the rest of the batch."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from experiments.measure import bits
from experiments.measure.__main__ import main


@pytest.mark.slow
def test_command_prints_each_case(tmp_path: Path, capsys: Any) -> None:
    main(["bits", "--kernels=blockwise", "--dtypes=float32", f"--workdir={tmp_path}"])
    table = (tmp_path / "table.md").read_text()
    assert "| attention, neighbors | equal |" in table
    assert "| layer, alone | equal |" in table
    assert "| layer, step |" in table
    assert table in capsys.readouterr().out


def test_difference_is_told_in_units_of_the_last_place() -> None:
    one = jnp.ones(4)
    assert bits.shown(one, one) == "equal"
    assert bits.shown(one.at[0].add(2**-22), one) == "2"
    assert bits.shown(one.at[0].set(jnp.nan), one.at[0].set(jnp.nan)) == "equal"
