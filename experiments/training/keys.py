"""The keys of a config, as dotted names, and what a value of each may be."""

import difflib
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from experiments.failures import RunError


def check_key(key: str, config: ConfigDict) -> None:
    """Raises a RunError that names the nearest key, unless config has this one."""
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
    """Nested mappings as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def check_values(values: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raises a RunError unless flat values have the keys of a schema, and types like its values.

    Args:
      values: by dotted key; those of a mesh's axis may be missing.
      schema: a config's own, by dotted key.
    """
    for key in sorted(schema.keys() | values.keys()):
        if key not in schema:
            raise RunError(f"there is no such key as {key!r:.100}")
        if key not in values:
            if not key.startswith("mesh."):
                raise RunError(f"{key} is missing")
        elif not _like(values[key], schema[key]):
            raise RunError(
                f"{key} must be {type(schema[key]).__name__}, such as {schema[key]!r}, got "
                f"{values[key]!r:.100}"
            )


def _like(value: Any, example: Any) -> bool:
    if isinstance(example, float):
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is type(example)
