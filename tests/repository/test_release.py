"""Facts stated in several places agree: the version, commands, Python versions."""

import re
import tomllib

import yaml

import flax_mha
from tests.support import pages

PROJECT = tomllib.loads(pages.read("pyproject.toml"))["project"]
WORKFLOW = yaml.safe_load(pages.read(".github/workflows/ci.yml"))


def test_citation_has_this_version() -> None:
    citation = yaml.safe_load(pages.read("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version"} <= citation.keys()
    assert citation["version"] == flax_mha.__version__
    assert citation["license"] == PROJECT["license"]
    released = re.search(r"^## \[(.+)] - (\S+)$", pages.read("CHANGELOG.md"), re.MULTILINE)
    assert released
    assert released.groups() == (flax_mha.__version__, str(citation["date-released"]))


def test_ci_runs_the_readme_commands() -> None:
    train, test = (
        command
        for command in pages.read("README.md").splitlines()
        if command.startswith("python3 -m venv")
    )
    assert test.split("activate && ")[1] in pages.read(".ci/run").splitlines()
    steps = [step.get("run") for step in WORKFLOW["jobs"]["commands"]["steps"]]
    assert steps[2:] == [train, test]


def test_ci_runs_every_supported_python() -> None:
    named = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    assert WORKFLOW["jobs"]["commands"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_ci_builds_the_site_with_the_documented_command() -> None:
    command = "python -m sphinx -W --keep-going"
    places = ("docs/conf.py", "CONTRIBUTING.md", ".ci/run", ".github/workflows/ci.yml")
    assert all(command in pages.read(place) for place in places)
