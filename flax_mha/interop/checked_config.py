"""Configs of models that record which settings a family reads."""

from collections import ChainMap, UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]

REMEDY = "take the config.json that was published with the weights"


def several(xs: Sequence[str]) -> str:
    """Format the first 100 strings, and the number of the others, as one line."""
    line, more = "; ".join(xs[:100]), len(xs) - 100
    return f"{line}; {more:,} more" if more > 0 else line


class FileSettings(UserDict[str, Any]):
    """A config that records the paths of the settings that were read in `seen`.

    A null setting counts as missing. `at` is the path of an object in a config.
    """

    def __init__(self, config: Config, at: str = "", seen: set[str] | None = None) -> None:
        super().__init__({name: x for name, x in config.items() if x is not None})
        self.at = at
        self.seen = set[str]() if seen is None else seen

    def __getitem__(self, name: str) -> Any:
        value, path = super().__getitem__(name), f"{self.at}{name}"
        self.seen.add(path)
        return FileSettings(value, f"{path}.", self.seen) if isinstance(value, Mapping) else value

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting, or its default, a bool only for bools."""
        value = super().get(name, default)
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ValueError(
                f"the config's {self.at}{name} must be true or false, got {value!r:.100}; {REMEDY}"
            )
        return value

    def unread(self, is_neutral: Callable[[str, Any], bool]) -> list[str]:
        """Return the settings that were not read, unless is_neutral(name, value), with values."""
        lines = []
        for name, x in self.data.items():
            path = f"{self.at}{name}"
            if is_neutral(name, x):
                continue
            if path not in self.seen:
                lines.append(f"{path}={x!r:.100}")
            elif isinstance(x, Mapping):
                lines += FileSettings(x, f"{path}.", self.seen).unread(is_neutral)
        return lines


def filled(config: Config, **defaults: Any) -> Config:
    """Return a config, filled with defaults."""
    return ChainMap[str, Any](config, defaults)  # type: ignore[arg-type]  # It is only read.
