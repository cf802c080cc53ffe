"""The wheel holds the package, its types and license, and the sdist no stray files."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import flax_mha

ROOT = Path(__file__).parents[2]
# `python -m build` would first download the backend.
BUILD = "import hatchling.build as b; b.build_sdist('dist'); b.build_wheel('dist')"


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("hatchling", "hatch_fancy_pypi_readme"))),
    reason="hatchling and hatch-fancy-pypi-readme are not installed",
)
def test_wheel_and_sdist_hold_the_package_and_no_stray_files(tmp_path: Path) -> None:
    tree = tmp_path / "flax_mha"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", ".*cache"))
    for stray in ("notes.txt", "runs/digits/config.json", "flax_mha/__pycache__/old.pyc"):
        (tree / stray).parent.mkdir(parents=True, exist_ok=True)
        (tree / stray).write_text("stray")
    subprocess.run([sys.executable, "-c", BUILD], cwd=tree, check=True, capture_output=True)
    info = f"flax_mha-{flax_mha.__version__}.dist-info"
    (path,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))
    modules = {str(x.relative_to(ROOT)) for x in (ROOT / "flax_mha").rglob("*.py")}
    own = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}
    assert names == modules | own | {"flax_mha/py.typed", "flax_mha/analysis/report.html"}
    # On a package's page relative links lead nowhere.
    assert not re.search(r"\]\((?!https?:)", metadata.get_payload())
    core = {x.partition(">")[0] for x in metadata.get_all("Requires-Dist") if "extra ==" not in x}
    assert core == {"chex", "flax", "jax", "safetensors", "typing-extensions"}

    (path,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"flax_mha/py.typed", "tests/support/oracle.py", "configs/digits.py"} <= names
    assert not [x for x in names if x.endswith((".pyc", "notes.txt")) or x.startswith("runs")]
