"""The flags of a config file, checked before their parser sees them."""

import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.failures import RunError
from experiments.training.keys import check_key


def checked(argv: Sequence[str], default: Path) -> list[str]:
    """The command line, with a config, if its keys are keys of that config.

    Args:
      argv: the command line.
      default: the config's file where `--config` is not given.

    Raises:
      SystemExit: with a message that names the nearest key, or a file.
    """
    path, keys = None, []
    for i, word in enumerate(argv):
        if match := re.fullmatch(r"--?config(?:=(.*))?", word):
            path = match[1] if match[1] is not None else "".join(argv[i + 1 : i + 2])
        elif match := re.match(r"--?(?:no)?config\.([^=]+)", word):
            keys.append(match[1])
    if path is None:
        path = str(default)
        argv = [argv[0], f"--config={path}", *argv[1:]]
    try:
        if not Path(path).is_file():
            raise RunError(f"--config must name a file such as {default}, got {path!r}")
        config = runpy.run_path(path)["get_config"]()
        for key in keys:
            check_key(key, config)
    except RunError as error:
        sys.exit(f"error: {error}")
    return list(argv)
