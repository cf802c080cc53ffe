"""Devices for tests, the draw of cases, and the processes that load JAX."""

import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

# Before any import of jax, which reads these once. Processes that tests start inherit them.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# Tests compile much and compute little. Tests that read compiled programs turn it on again.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# A later run compiles no test's programs again; `--cache-clear` removes them.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "d" / "compiled")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# The seed of all draws: today, unless an earlier run is repeated. Workers of xdist inherit it.
DRAW = int(os.environ.setdefault("TEST_DRAW", str(int(time.time() // 86400))))


# How many cases this run leaves out.
LEFT_OUT = {"cases": 0}


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Start no workers for tests that the command names one by one, and none to list tests."""
    named = config.args and all("::" in name for name in config.args)
    return 0 if named or config.option.collectonly else None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Load JAX in the processes that run tests; the first process of xdist only hands them out."""
    # Before hypothesis reads its option.
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = DRAW
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.support.session")


def pytest_report_header() -> str:
    return f"draw: TEST_DRAW={DRAW}"


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count the cases that this process leaves out."""
    LEFT_OUT["cases"] += len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the count of a worker to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = LEFT_OUT["cases"]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive the count of a worker. All workers leave out the same cases."""
    LEFT_OUT["cases"] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what did not run, and the commands that repeat failed tests with the same draw."""
    if LEFT_OUT["cases"] and terminalreporter.config.option.markexpr == "not slow":
        terminalreporter.write_line(
            f"did not run: {LEFT_OUT['cases']:,} cases, which are slow or take turns by the day."
            " -m slow runs a part of them, -m 'slow or grid' all."
        )
    failed = [
        report.nodeid
        for outcome in ("failed", "error")
        for report in terminalreporter.stats.get(outcome, ())
    ]
    if not failed:
        return
    terminalreporter.section("to repeat")
    flags = ("TEST_DRAW", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    setting = " ".join(f"{name}={os.environ[name]}" for name in flags)
    for name in dict.fromkeys(failed[:20]):
        terminalreporter.write_line(f"{setting} python -m pytest -n 0 -m '' {shlex.quote(name)}")
