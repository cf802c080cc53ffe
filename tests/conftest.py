"""Devices for tests, the draw of cases, and the processes that load JAX."""

import os
import shlex
import time

import pytest

# Before any import of jax, which reads these once. Processes that tests start inherit them.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# Tests compile much and compute little. Tests that read compiled programs turn it on again.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The seed of all draws: today, unless an earlier run is repeated. Workers of xdist inherit it.
DRAW = int(os.environ.setdefault("TEST_DRAW", str(int(time.time() // 86400))))


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the commands that repeat the failed tests with this run's draw."""
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
