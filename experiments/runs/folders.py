"""The run in a folder: its config, its data and its lock."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import filelock
import jax
from ml_collections import ConfigDict

from experiments.common import outputs
from experiments.common.failures import RunError
from experiments.runs import config, hosts

CONFIG, RUN, LOCK = "config.json", "run.json", "lock"
_locks: dict[Path, filelock.BaseFileLock] = {}  # A lock that nobody refers to opens.


@dataclasses.dataclass(frozen=True)
class Run:
    """A folder, the config that is trained in it, and what was written as it began.

    Attributes:
      began: for a resumed run, the content of `run.json`; None for a new one.
    """

    path: Path
    config: ConfigDict
    began: dict[str, Any] | None = None

    def begin(self, data: str, weights: str | None = None) -> str | None:
        """Lock the folder for this process's lifetime, and write config and data to a new one.

        All processes of the run call this, and all refuse if one does, or if they disagree.

        Args:
          data: the fingerprint of the data.
          weights: the folder of the run that parameters start from; None for fresh ones. It is
            returned; a resumed run returns its own.
        """
        same = {"data": data, "--workdir": str(self.path), "--weights": weights}
        hosts.agree({"config": config.flatten(self.config), **same})
        hosts.all_or_none(lambda: self._begin(data, weights))
        return weights if self.began is None else self.began["weights"]

    def _begin(self, data: str, weights: str | None) -> None:
        self.check_data(data)
        if self.began is not None and weights not in (None, self.began["weights"]):
            raise RunError(
                f"{self.path} began with the weights of {self.began['weights']}, got "
                f"--weights={weights}; drop the flag, or choose a new --workdir"
            )
        if jax.process_index() > 0:
            return
        outputs.make(self.path, "--workdir")
        _lock(self.path)
        if self.began is not None:
            return
        if (self.path / RUN).exists():
            raise RunError(f"another run has just begun in {self.path}; choose another --workdir")
        outputs.write_json(self.path / CONFIG, self.config.to_dict())
        # Last, since it makes the folder a run.
        began = {"command": sys.argv, "data": data, "weights": weights, "jax": jax.__version__}
        outputs.write_json(self.path / RUN, began)

    def check_data(self, data: str) -> None:
        """Check that a run that began earlier began with the data of this fingerprint."""
        if self.began is not None and self.began["data"] != data:
            raise RunError(
                f"the data of {self.path} have the SHA-256 {self.began['data']}, those found now "
                f"{data}; go on with the same files and versions of packages"
            )


def open_run(workdir: str | None, asked: config.Asked) -> Run:
    """Return the run of a folder, new or resumed.

    A resumed run keeps its config, in which only the mesh may change. It is refused if the command
    line names any other value.

    Args:
      workdir: the folder; None for a new one.
      asked: what the command line says about the config.
    """
    if workdir is None:
        if jax.distributed.is_initialized():
            raise RunError("--distributed needs one folder for all: give each the same --workdir")
        return Run(outputs.new_folder(asked.config.task), asked.config)
    path = outputs.local(workdir)
    if not path.exists() or {each.name for each in path.iterdir()} <= {CONFIG, LOCK}:
        return Run(path, asked.config)  # Perhaps a start that was cut off.
    run = find_run(path)
    saved = config.flatten(run.config)
    mesh = {key: x for key, x in asked.named.items() if key.startswith("mesh.")}
    differ = [
        f"{key} is {saved.get(key)!r} there, and {value!r} was asked for"
        for key, value in asked.named.items()
        if key not in mesh and saved.get(key) != value
    ]
    if differ:
        raise RunError(
            f"{path} holds a run with another config: {'; '.join(differ)}; drop the flags, or "
            f"choose a new --workdir"
        )
    run.config.update_from_flattened_dict(mesh)
    return run


def find_run(workdir: str | Path, flag: str = "--workdir") -> Run:
    """Return the run in a folder that a flag names."""
    path = outputs.local(workdir, flag)
    if not (path / RUN).exists():
        raise RunError(f"{flag} must be the folder of a run, got {path}; choose another folder")
    try:
        saved, began = (json.loads((path / name).read_text()) for name in (CONFIG, RUN))
    except ValueError as error:
        raise RunError(f"{path} has a damaged {CONFIG} or {RUN} ({error}); restore it") from None
    return Run(path, ConfigDict(saved), began)


def _lock(folder: Path) -> None:
    """Lock a folder until this process ends, however it ends."""
    try:
        _locks.setdefault(folder, filelock.FileLock(folder / LOCK, timeout=0)).acquire()
    except filelock.Timeout:
        raise RunError(
            f"another process trains in {folder}; wait for its end, or choose another --workdir"
        ) from None
