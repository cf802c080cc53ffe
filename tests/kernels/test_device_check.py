"""`measure check` on this machine: kernels as they are, those for TPUs interpreted, and broken."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from experiments.common.failures import RunError
from experiments.measure import __main__ as measure
from experiments.measure import check


def checked(folder: Path, *flags: str) -> dict[str, dict[str, Any]]:
    measure.main(["check", f"--workdir={folder}", *flags])
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return {row.pop("call"): row for row in rows}


@pytest.mark.sampled(0.12)
def test_wrong_and_failing_kernels_are_named(tmp_path: Path, monkeypatch, capsys) -> None:
    def broken(q, k, v, *, kernel: str, **call):
        if kernel == "checkpointed":
            raise RuntimeError("no such instruction\nat line 3")
        out = check.dot_product_attention(q, k, v, kernel=kernel, **call)
        # One head of one token is wrong, or a whole one is NaN.
        value = jnp.nan if "mask" in call else 0.5
        return out if kernel == "reference" else out.at[1, -1, 0].add(value)

    for name in ("full", "causal"):
        monkeypatch.setitem(check.CALLS, name, check.CALLS[name]._replace(attend=broken))
    with pytest.raises(SystemExit) as ended:
        checked(tmp_path, "--calls=full,causal,huge")
    assert ended.value.code == 1
    said, log = capsys.readouterr()
    assert "checking causal, 2 of 3 …" in log
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["call"]: row["blockwise"]["status"] for row in rows}["huge"] == "holds"
    assert " ms |" in (tmp_path / "table.md").read_text()
    assert "| full | DIFFERS " in said
    assert "| causal | DIFFERS inf |" in said
    assert "| FAILED: RuntimeError: no such instruction |" in said


def test_unknown_calls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"--calls: must be some of full,causal,.* got 'casual'"):
        checked(tmp_path, "--calls=casual")


def test_calls_end_with_the_time(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(check, "SECONDS", -1.0)
    assert checked(tmp_path, "--calls=full,causal") == {}
    assert "the time is over, so 2 of 2 were left out" in capsys.readouterr().out
