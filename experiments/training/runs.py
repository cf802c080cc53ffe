"""A run's folder: its config, whose it is, and the way to stop it."""

import contextlib
import dataclasses
import datetime
import difflib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from experiments import folders
from experiments.failures import RunError

PROGRAM = "experiments.train"
CONFIG, METRICS, MARK = "config.json", "metrics.jsonl", "run.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """A folder, and the config that is trained in it."""

    path: Path
    config: ConfigDict
    resumed: bool

    def begin(self, data: str) -> None:
        """Makes a new run's folder ours, with its data's fingerprint; checks that of an old one."""
        if self.resumed:
            self.check_data(data)
        _wait_for_all("workdir read")
        if not self.resumed and jax.process_index() == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            _write_json(self.path / CONFIG, self.config.to_dict())
            mark = {
                "program": PROGRAM,
                "command": sys.argv,
                "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
                "jax": jax.__version__,
                "devices": [device.device_kind for device in jax.devices()],
                "data": data,
            }
            _write_json(self.path / MARK, mark)  # Last: a folder with this file has a config too.
        _wait_for_all("workdir written")

    def check_data(self, data: str) -> None:
        """Raises a RunError unless the run was begun with the data of this fingerprint."""
        had = json.loads((self.path / MARK).read_text()).get("data", data)
        if had != data:
            raise RunError(
                f"the data of {self.path} have the SHA-256 {had}, those found now {data}; go on "
                f"with the files and the versions of Python and packages that it was begun with"
            )


def open_run(workdir: str | Path | None, config: ConfigDict, overrides: Mapping[str, Any]) -> Run:
    """Finds the folder of a run, new or one to come back to.

    Args:
      workdir: the folder; None for a new one under `runs/`.
      config: of a new run, overrides included.
      overrides: what the caller insists on, by dotted key: in a folder that has a run already,
        that run's own config rules, except for the mesh, which may change with the machine.

    Raises:
      RunError: if the folder holds something else, or a run with other values.
    """
    if workdir is None:
        if jax.distributed.is_initialized():
            raise RunError("--distributed needs one folder for all: give each the same --workdir")
        path = folders.new_folder(config.task)
    else:
        path = Path(workdir).absolute()
    resumed = _is_ours(path)
    if resumed:
        saved = find_run(path).config
        _check_agrees(path, saved, overrides)
        asked = {
            key.removeprefix("mesh."): value
            for key, value in overrides.items()
            if key.startswith("mesh.")
        }
        saved.mesh = ConfigDict({**config.mesh, **saved.mesh, **asked})
        config = saved
    return Run(path, config, resumed)


def find_run(workdir: str | Path) -> Run:
    """The run in a folder.

    Raises:
      RunError: if there is none.
    """
    path = Path(workdir).absolute()
    if not _is_ours(path):
        raise RunError(f"--workdir must be the folder of a run, and there is none in {path}")
    return Run(path, ConfigDict(json.loads((path / CONFIG).read_text())), resumed=True)


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


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _wait_for_all(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _is_ours(path: Path) -> bool:
    """Whether there is a run; a folder that is missing or empty can become one."""
    if not path.exists():
        return False
    if not path.is_dir():
        raise RunError(f"--workdir must be a folder, and {path} is a file; choose another")
    if not any(path.iterdir()):
        return False
    try:
        if json.loads((path / MARK).read_text())["program"] == PROGRAM:
            return True
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise RunError(
        f"{path} is not empty and not a run of {PROGRAM}; "
        f"nothing was touched; choose a new --workdir"
    )


def _check_agrees(path: Path, saved: ConfigDict, overrides: Mapping[str, Any]) -> None:
    had = flatten(saved.to_dict())
    wanted = flatten(json.loads(json.dumps(dict(overrides), default=lambda c: c.to_dict())))
    differ = [
        f"{key} is {had.get(key)!r} there, and {value!r} was asked for"
        for key, value in wanted.items()
        if had.get(key) != value and not key.startswith("mesh.")
    ]
    if differ:
        raise RunError(
            f"{path} holds a run with its own config, and a run keeps it to the end: "
            f"{'; '.join(differ)}; drop the override, or choose a new --workdir"
        )


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[int], bool]]:
    """Turns the first SIGINT or SIGTERM into a question that the loop can ask; the second kills.

    With several processes, a signal to one stops all of them, after the same step; more signals
    change nothing there, save SIGKILL.

    Yields:
      A function that says whether to stop after a step; to be asked after each.
    """
    asked = threading.Event()

    def stop(step: int) -> bool:
        return asked.is_set() or multihost_utils.reached_preemption_sync_point(step)

    together = jax.distributed.is_initialized()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Only the main thread may handle signals.
        return
    # JAX itself listens to SIGTERM where processes run together, and tells the others.
    signals = (signal.SIGINT,) if together else (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def ask(number: int, frame: FrameType | None) -> None:
        if together:
            signal.raise_signal(signal.SIGTERM)
        else:
            asked.set()
        for each in signals:
            signal.signal(each, signal.SIG_DFL)

    for number in signals:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number in signals:
            signal.signal(number, before[number])
