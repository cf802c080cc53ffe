"""The wheel libtpu as a mere compiler, and beside a TPU."""

import os
from pathlib import Path

import pytest

from experiments.common import libtpu


@pytest.mark.parametrize(
    ("vendor", "kind", "quiet"),
    [
        (None, None, True),
        ("0x8086", "0x120000", True),
        ("0x1ae0", "0x020000", True),  # a virtual network card
        ("0x1ae0", "0x120000", False),
    ],
)
def test_libtpu_is_quiet_without_tpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str | None, kind: str, quiet: bool
) -> None:
    for name in libtpu._QUIET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_MIN_LOG_LEVEL", "0")
    if vendor:
        (tmp_path / "0000").mkdir()
        (tmp_path / "0000" / "vendor").write_text(vendor + "\n")
        (tmp_path / "0000" / "class").write_text(kind + "\n")
    libtpu.compiler_only(tmp_path)
    assert ("TPU_SKIP_MDS_QUERY" in os.environ) == quiet
    assert os.environ["TPU_MIN_LOG_LEVEL"] == "0"  # the user's setting stays
