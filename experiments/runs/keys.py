"""The keys of a config, as dotted names."""

import difflib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from experiments.runs.failures import RunError


def check_key(key: str, config: ConfigDict) -> None:
    """Check that a config has a key, or raise a RunError that names the nearest."""
    known = [*flatten(config.to_dict()), *(k for k, v in config.items() if hasattr(v, "items"))]
    if key in known:
        return

    # By the last word first: `learning_rat` means `optimizer.learning_rate`.
    def likeness(name: str) -> float:
        full = difflib.SequenceMatcher(None, key, name).ratio()
        last = difflib.SequenceMatcher(None, key.split(".")[-1], name.split(".")[-1]).ratio()
        return full + last

    nearest = max(known, key=likeness)
    raise RunError(f"the config has no key {key!r}; the nearest is {nearest!r}")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
