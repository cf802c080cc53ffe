"""The command line: a config file, the keys that it overrides, and the other flags."""

import json
import os
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict

from experiments.runs import command, fields, files
from experiments.runs.failures import RunError
from experiments.runs.fields import check_key, flatten


class Asked(NamedTuple):
    """A parsed command line.

    Attributes:
      config: the config of the file, with the overrides of the command line.
      overrides: values by dotted key that a resumed run must have: the overrides, and all values of
        a file that the command line names.
      path: the config file.
      rest: the other arguments.
    """

    config: ConfigDict
    overrides: dict[str, Any]
    path: str
    rest: list[str]


def parse(argv: Sequence[str], default: Path) -> Asked:
    """Parse the command line, the program's other flags included.

    The program ends after the help of --help.
    """
    asked = read(argv, default)
    more, rule = described(asked.config, asked.path), "settings must be --config.KEY=VALUE"
    return asked._replace(rest=command.parse(asked.rest, more, rule=rule))


def read(argv: Sequence[str], default: Path) -> Asked:
    """Parse and check the config of a command line, and leave other flags in `rest`."""
    words, rest = _taken(argv, {"config": False})
    path = words.get("config", str(default))
    config = _load(path, default)
    values = {k: fields.normalize(k, x) for k, x in flatten(config.to_dict()).items()}
    schema = fields.schema(values.get("task"), values)
    fields.check(values, schema)
    kinds = {f"config.{key}": type(value) is bool for key, value in values.items()}
    words, rest = _taken(rest, kinds)
    for word in rest[1:]:
        if wrong := re.match(r"--?(?:no)?config\.([^=]*)", word):
            check_key(wrong[1], config)
            raise RunError(_no_value(wrong[1], values, word))
    typed = {
        key: fields.of(key, schema[key]).read(words[f"config.{key}"])
        for key in values
        if f"config.{key}" in words
    }
    fields.check(values | typed, fields.schema(typed.get("task", config.task), values))
    with config.ignore_type():  # A file may have an int for a float.
        config.update_from_flattened_dict(typed)
    config = ConfigDict(json.loads(files.to_json(config.to_dict())))  # as it will be resumed
    named = flatten(config.to_dict()) if path != str(default) else {}
    return Asked(config, named | typed, path, rest)


def described(config: ConfigDict, path: str) -> str:
    """Return help on the keys of a config: meaning, valid values and current value."""
    lines = [f"--config=FILE: a config, such as {path}, which has these keys:"]
    for key, value in flatten(config.to_dict()).items():
        field = fields.of(key, value)
        about = f"{field.about}; " if field.about else ""
        lines.append(f"  --config.{key}: {about}{field.rule} (default: {value!r})")
    return "\n".join(lines)


def _taken(argv: Sequence[str], names: dict[str, bool]) -> tuple[dict[str, str], list[str]]:
    """Return the values of some flags by name, and all other arguments.

    A name is True for a switch, which needs no value.
    """
    parser: flags.ArgumentParser[str] = flags.ArgumentParser()
    values = flags.FlagValues()
    values.set_gnu_getopt()
    for name, switch in names.items():
        flags.DEFINE_flag(flags.Flag(parser, None, name, None, "", boolean=switch), values)
    try:
        rest = values(argv, known_only=True)
    except (flags.Error, ValueError) as error:
        raise RunError(command.line(error)) from None
    return {name: str(values[name].value) for name in names if values[name].present}, rest


def _no_value(key: str, values: dict[str, Any], word: str) -> str:
    """Return why a word does not set a key, or group of keys, of the config."""
    if key in values:
        rule = fields.of(key, values[key]).rule
        return f"config.{key} must be {rule}, got {word}; try --config.{key}={values[key]}"
    first = next(each for each in values if each.startswith(f"{key}."))
    return (
        f"config.{key} is a group of keys, got {word:.100}; set its keys one by one: "
        f"--config.{first}={values[first]}"
    )


def _load(path: str, default: Path) -> ConfigDict:
    """Return the config that a file makes: code, which is run."""
    if not os.path.isfile(path):
        raise RunError(f"--config must name a file such as {default}, got {path!r}")
    try:
        config = runpy.run_path(path)["get_config"]()
        if not isinstance(config, ConfigDict):
            raise TypeError(f"get_config() must return a ConfigDict, got {type(config).__name__}")
        config.to_dict()  # Values that are still missing raise an error.
    except (Exception, SystemExit) as error:
        reason = "it has no get_config()" if repr(error) == "KeyError('get_config')" else (
            f"{type(error).__name__}: {command.line(error)}"
        )  # fmt: skip
        raise RunError(f"--config={path} can't be read as a config: {reason}") from error
    return config
