"""The tables of docs/conventions.md are complete, and installed packages do what they say."""

from pathlib import Path

import pytest

from experiments.measure import __main__ as measure
from experiments.measure.conventions import cells, compare
from experiments.measure.conventions.libraries import LIBRARIES


def test_every_measured_cell_is_on_the_page() -> None:
    record, versions = compare.tables("library"), compare.tables("package")
    for name, library in LIBRARIES.items():
        assert library.package in versions
        columns = {column for column, (needed, _) in cells.MEASURED.items()
                   if not needed or needed in library.accepts}  # fmt: skip
        columns |= {"biases", "deviation of q"} if library.layer else set()
        assert columns <= record[name].keys(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_installed_packages_do_what_the_page_says(name: str) -> None:
    if not LIBRARIES[name].installed:
        pytest.skip(f"needs {LIBRARIES[name].package}")
    record = compare.tables("library")[name]
    found = cells.measure(LIBRARIES[name])
    assert not {c: x for c, x in found.items() if not compare.equal(record.get(c, ""), x)}


def test_a_changed_cell_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cells, "measure", lambda library: {"True": "hides", "no key": "mean of all"}
    )
    measure.main(["conventions", "--only=flax.linen", f"--workdir={tmp_path}"])
    table = (tmp_path / "table.md").read_text()
    assert "| flax.linen | True | attends | hides |" in table
    assert "no key" not in table
    assert "1 rows were measured, and 1 cells differ" in capsys.readouterr().out
