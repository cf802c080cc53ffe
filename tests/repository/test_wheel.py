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

ROOT = Path(__file__).parent.parent.parent
# `python -m build` would first download the backend.
BUILD = "import hatchling.build as b; b.build_sdist('dist'); b.build_wheel('dist')"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("hatchling", "hatch_fancy_pypi_readme"))),
        reason="hatchling and hatch-fancy-pypi-readme are not installed",
    ),
]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a working tree with stray files in it."""
    tree = tmp_path_factory.mktemp("tree") / "flax_mha"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", ".*cache"))
    for stray in ("notes.txt", "runs/digits/config.json", "flax_mha/__pycache__/old.pyc"):
        (tree / stray).parent.mkdir(parents=True, exist_ok=True)
        (tree / stray).write_text("stray")
    subprocess.run([sys.executable, "-c", BUILD], cwd=tree, check=True, capture_output=True)
    return tree / "dist"


def test_wheel_holds_package_types_and_license(dist: Path) -> None:
    (path,) = dist.glob("*.whl")
    assert path.name == f"flax_mha-{flax_mha.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        info = f"flax_mha-{flax_mha.__version__}.dist-info"
        metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))
    modules = {str(x.relative_to(ROOT)) for x in (ROOT / "flax_mha").rglob("*.py")}
    own = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}
    assert names == modules | own | {"flax_mha/py.typed", "flax_mha/analysis/report.html"}
    assert metadata["Version"] == flax_mha.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    # On a package's page relative links lead nowhere.
    assert not re.search(r"\]\((?!https?:)", metadata.get_payload())
    core = [x for x in metadata.get_all("Requires-Dist") if "extra ==" not in x]
    assert sorted(x.partition(">")[0] for x in core) == [
        "chex",
        "flax",
        "jax",
        "safetensors",
        "typing-extensions",
    ]


def test_sdist_holds_sources_and_no_stray_files(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    tops = {name.partition("/")[0] for name in names}
    assert tops == {
        ".ci", ".github", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md",
        "LICENSE", "PKG-INFO", "README.md", "SECURITY.md", "configs", "docs", "experiments",
        "flax_mha", "pyproject.toml", "tests",
    }  # fmt: skip
    assert not [name for name in names if name.endswith(".pyc")]
    assert {"flax_mha/py.typed", "tests/support/oracle.py", "configs/digits.py"} <= names
