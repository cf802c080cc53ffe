"""Devices for tests, and the processes that load JAX."""

import os

import pytest

# Before any import of jax, which reads these once. Processes that tests start inherit them.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# Tests compile much and compute little. Tests that read compiled programs turn it on again.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Load JAX in the processes that run tests; the first process of xdist only hands them out."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.support.session")
