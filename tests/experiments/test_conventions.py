"""The tables of docs/conventions.md are complete, and installed packages do what they say."""

import re
from pathlib import Path

import pytest

from experiments.measure import __main__ as measure
from experiments.measure.conventions import cells, compare
from experiments.measure.conventions.libraries import LIBRARIES

# What cells of these columns begin with.
ROW = r"mean of|NaN|0|as without mask|–"
WORDS = {
    "True": "attends|hides|–",
    "numbers": "added|inverted|refused|–",
    "no key": ROW,
    "−inf": ROW,
    "finfo.min": ROW,
    "NaN": "leaks",
    "groups": r"n // G|n % K|refused|–",
}  # fmt: skip


def test_every_measured_cell_is_on_the_page() -> None:
    record, versions = compare.tables("library"), compare.tables("package")
    for name, library in LIBRARIES.items():
        assert library.package in versions
        columns = {column for column, (needed, _) in cells.MEASURED.items()
                   if not needed or needed in library.accepts}  # fmt: skip
        columns |= {"biases", "deviation of q"} if library.layer else set()
        assert columns <= record[name].keys(), name


def test_cells_of_the_page_have_known_words() -> None:
    record = compare.tables("library")
    assert len(record) >= 51
    for name, row in record.items():
        for column in row.keys() & WORDS.keys():
            assert re.match(WORDS[column], row[column]), (name, column, row[column])


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
