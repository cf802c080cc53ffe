"""Timing of decoding steps."""

import json
from pathlib import Path

import pytest

from experiments.measure import __main__ as measure
from experiments.measure.peers import decoding
from experiments.measure.timing import Work

FOUND = ("tokens", "seconds", "token_by_token", "ratio", "linen")


@pytest.mark.sampled(0, slow=0.16)
def test_decoding_writes_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "PROMPT", 16)
    size = ("--lengths=64", "--batch=2", "--heads=2", "--features=8")
    measure.main(["decoding", *size, "--seconds=0.02", f"--workdir={tmp_path / 'results'}"])
    assert "16 tokens" in capsys.readouterr().out
    result = json.loads((tmp_path / "results" / "results.json").read_text())
    rows = {row["label"]: row for row in result["rows"]}
    for name in ("linen", "ours", "ours, nearly empty", "ours, int8"):
        assert rows[name]["status"] == "ok"
        assert rows[name]["bytes_per_second"] > 0
    # Keys and values of 48 tokens, and four projections.
    assert rows["ours"]["bytes"] == (2 * 2 * 48 * 8 + 4 * 8 * 8) * 4
    assert result["prefill"]["ratio"] > 0


def test_decoding_continues_after_out_of_memory(tmp_path: Path, monkeypatch, capsys) -> None:
    """No prompt is timed if no size fits both layers."""

    def linen(size: decoding.Size, filled: int) -> Work:
        if size.S == 8:
            raise MemoryError(f"no room for {size.S} slots")
        return cheap(size, filled)

    def cheap(size: decoding.Size, filled: int) -> Work:
        return Work(lambda: 0, lambda _: None)

    both = [decoding.Entry("linen", linen, 4), decoding.Entry("ours", cheap, 4)]
    monkeypatch.setattr(decoding, "entries", lambda size: both)
    monkeypatch.setattr(decoding, "prefill", lambda size, seconds: dict.fromkeys(FOUND, 1))
    flags = ["decoding", "--heads=2", "--features=8", "--seconds=0.01"]
    measure.main([*flags, "--lengths=8,16", f"--workdir={tmp_path / 'two'}"])
    assert "a prompt of 1 tokens" in capsys.readouterr().out
    rows = json.loads((tmp_path / "two" / "results.json").read_text())["rows"]
    assert [(row["S"], row["label"], row["status"]) for row in rows] == [
        (8, "linen", "failed"), (8, "ours", "ok"), (16, "linen", "ok"), (16, "ours", "ok"),
    ]  # fmt: skip
    assert rows[0]["reason"] == "MemoryError: no room for 8 slots"
    measure.main([*flags, "--lengths=8", f"--workdir={tmp_path / 'none'}"])
    assert "no time or no memory left for a prompt" in capsys.readouterr().out
