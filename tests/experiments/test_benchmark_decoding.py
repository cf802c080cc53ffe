"""Steps against a cache, timed: --decode."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark import __main__ as benchmark
from experiments.benchmark import decoding, torch_peers


@pytest.mark.slow
def test_decoding_leaves_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "PROMPT", 16)
    size = ("--lengths=64", "--batch=2", "--heads=2", "--features=8")
    benchmark.main(["--decode", *size, "--seconds=0.02", f"--workdir={tmp_path / 'results'}"])
    assert "16 tokens" in capsys.readouterr().out
    result = json.loads((tmp_path / "results" / "results.json").read_text())
    rows = {row["label"]: row for row in result["rows"]}
    for name in ("linen", "ours", "ours, nearly empty", "ours, int8"):
        assert rows[name]["status"] == "ok"
        assert rows[name]["bytes_per_second"] > 0
    # Keys and values of 48 tokens, and four projections.
    assert rows["ours"]["bytes"] == (2 * 2 * 48 * 8 + 4 * 8 * 8) * 4
    assert result["prefill"]["ratio"] > 0


def test_torch_decodes_as_we_do() -> None:
    """From the same empty cache: with no token before, every output is its own value's."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    size = decoding.Size(2, 64, 2, 8, "float32")
    work = torch_peers.decoding(size, 0)
    first = work.outcome(work.call()).out
    # The same token again: attention to two equal keys gives the same.
    np.testing.assert_allclose(work.outcome(work.call()).out, first, atol=1e-5)
