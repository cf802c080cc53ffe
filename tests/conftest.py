"""Where tests run, `tests.support.session` sets JAX up for them."""

import os

import pytest

# Before jax is imported anywhere: it reads these once.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)


def pytest_configure(config: pytest.Config) -> None:
    """Load JAX where tests run: of the processes of xdist, the first one only hands them out."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.support.session")
