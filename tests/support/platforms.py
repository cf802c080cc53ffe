"""Platforms that are not here."""

import pytest

from flax_mha import sharding
from flax_mha.kernels.call.only_on import only_on
from flax_mha.sharding import devices


def pretend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make the devices of this process report themselves as those of another platform."""
    for module in (devices, sharding):
        monkeypatch.setattr(module, "platform", lambda: name)
    monkeypatch.setattr(only_on, "bind", lambda x, platform: x)
