"""The config of a run: a file of `configs`, and `--config.KEY=VALUE` for single keys of it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict, config_flags

from experiments.common.command import last_line
from experiments.common.failures import RunError, boundary
from experiments.runs import log

SEEDS = 2**32  # There are this many seeds.
# Keys of whole numbers, of which some configs lack some.
_COUNTS = (
    "steps", "seeds", "batch_size", "log_every", "evaluate_every", "checkpoint_every", "keep_last",
    "max_skipped", "optimizer.accumulate",
)  # fmt: skip


class Asked(NamedTuple):
    """What a command line says about the config.

    Attributes:
      config: the config of the file, with the changes of the command line.
      named: the values that a resumed run must have, by dotted key: flags of single keys, and every
        value of a file that --config names.
    """

    config: ConfigDict
    named: dict[str, Any]


def define(default: Path) -> flags.FlagHolder[ConfigDict]:
    """Define and return the flag --config, and with it --config.KEY for each key of its file."""
    about = "A file of configs/, which describes its keys; --config.KEY=VALUE changes one."
    with boundary():  # The library reads the changes of the command line here already.
        try:
            return config_flags.DEFINE_config_file("config", str(default), about)
        except AttributeError as error:
            raise RunError(f"the config has no such key: {last_line(error)}") from None


def asked(flag: flags.FlagHolder[ConfigDict]) -> Asked:
    """Return what the parsed command line says."""
    try:
        # As a resumed run will read it: a tuple becomes a list.
        config = ConfigDict(json.loads(json.dumps(flag.value.to_dict())))
    except (OSError, TypeError) as error:  # The flag tells here of a file that it can't load.
        raise RunError(
            f"--config must be a file whose get_config() returns groups of numbers, texts and "
            f"lists, got: {last_line(error)}"
        ) from None
    check(config)
    parsed, values = flags.FLAGS["config"], flatten(config)
    named = values if parsed.present else config_flags.get_override_values(parsed)
    return Asked(config, {key: values[key] for key in named})


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Return the values by dotted key."""
    return flatten_dict(config.to_dict(), sep=".")


def check(config: ConfigDict) -> None:
    """Check what neither the model nor the optimizer checks."""
    values = flatten(config)
    for key in (*_COUNTS, "keep_best", "mesh.force_host_devices"):
        least = int(key in _COUNTS)
        if values[key] < least:
            raise RunError(f"config.{key} must be a whole number from {least}, got {values[key]}")
    seed, seeds = config.seed, config.seeds
    if not 0 <= seed <= SEEDS - seeds:
        raise RunError(
            f"config.seed must be from 0 to {SEEDS - seeds} for config.seeds={seeds}, got {seed}"
        )
    steps, accumulate = config.steps, config.optimizer.accumulate
    if steps % accumulate:
        raise RunError(
            f"config.steps must be a multiple of config.optimizer.accumulate={accumulate}, got "
            f"{steps}; try {-(-steps // accumulate) * accumulate}"
        )
    if unknown := set(log.named(config)) - log.TRACKERS.keys():
        raise RunError(
            f"config.report_to must be some of {', '.join(log.TRACKERS)}, got {min(unknown)!r}"
        )
