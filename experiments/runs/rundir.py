"""The folder of a run: its config, its data, and the checks before it is used."""

import dataclasses
import datetime
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from experiments.runs import fields, files, folders, hosts, lock, record
from experiments.runs.failures import RunError
from experiments.runs.fields import flatten
from experiments.runs.integrity import digest

PROGRAM = "experiments.train"
CONFIG, METRICS, MARK = "config.json", "metrics.jsonl", "run.json"
FORMAT = 2  # of the folder; checkpoints of the first had no checksums
# The settings of JAX under which a run draws and computes other numbers.
SETTINGS = (
    "jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl",
    "jax_random_seed_offset", "jax_default_matmul_precision",
)  # fmt: skip


def settings() -> dict[str, Any]:
    """Return the values of `SETTINGS`."""
    return {name: getattr(jax.config, name) for name in SETTINGS}


@dataclasses.dataclass(frozen=True)
class Run:
    """A folder, and the config that is trained in it."""

    path: Path
    config: ConfigDict
    resumed: bool

    def begin(self, data: str) -> None:
        """Lock the folder, and write config and data's fingerprint to a new one."""
        refused = None
        try:
            if self.resumed:
                self.check_data(data)
                self._check_settings()
            if jax.process_index() == 0:
                self._claim(data)
                (self.path / record.FOLDER).mkdir(exist_ok=True)
        except RunError as error:
            refused = str(error)
        hosts.all_begin(refused)

    def check_data(self, data: str) -> None:
        """Check that the run was begun with the data of this fingerprint."""
        had = _read_mark(self.path)["data"]
        if had != data:
            raise RunError(
                f"the data of {self.path} have the SHA-256 {had}, those found now {data}; go on "
                f"with the files and the versions of Python and packages that it was begun with"
            )

    def _check_settings(self) -> None:
        """Check that the run draws and computes as it did when it began."""
        had = _read_mark(self.path).get("settings")
        for name, value in settings().items():
            # The folder is untrusted: its settings can be missing or of any type.
            was = had.get(name, value) if isinstance(had, dict) else value
            if was != value:
                remedy = (
                    f"unset {name.upper()}" if was is None else f"set {name.upper()}={was!s:.50}"
                )
                raise RunError(
                    f"{self.path} was begun under {name}={was!r:.50}, and would draw or compute "
                    f"other numbers under {name}={value!r}; {remedy}"
                )

    def _claim(self, data: str) -> None:
        folders.make(self.path)
        if not lock.hold(self.path):
            print(
                f"the file system of {self.path} has no locks: see to it that no other run uses it",
                flush=True,
            )
        if self.resumed:
            return
        if (self.path / MARK).exists():
            raise RunError(f"another run has just begun in {self.path}; choose another --workdir")
        config = self.config.to_dict()
        mark = {
            "program": PROGRAM,
            "format": FORMAT,
            "command": sys.argv,
            "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "jax": jax.__version__,
            "devices": [device.device_kind for device in jax.devices()],
            "settings": settings(),
            "data": data,
            "config": digest(config),
            "more": sorted(flatten(config).keys() - fields.schema(self.config.task, {}).keys()),
        }
        try:
            files.write_json(self.path / CONFIG, config)
            files.write_json(self.path / MARK, mark)  # Last: then the folder has a config too.
        except BaseException:  # A start that fails leaves nothing.
            (self.path / CONFIG).unlink(missing_ok=True)
            lock.release(self.path, remove=True)
            raise


def open_run(workdir: str | Path | None, config: ConfigDict, overrides: Mapping[str, Any]) -> Run:
    """Return the run of a folder, new or resumed.

    Args:
      workdir: the folder; None for a new one under `runs/`.
      config: the config of a new run, overrides included.
      overrides: the values that a resumed run must have, by dotted key. Its other values are its
        own; only the mesh may change with the machine.
    """
    if workdir is None:
        if jax.distributed.is_initialized():
            raise RunError("--distributed needs one folder for all: give each the same --workdir")
        path = folders.new_folder(config.task)
    else:
        path = folders.local(workdir)
    resumed = _is_ours(path, config)
    if resumed:
        named = {key: value for key, value in flatten(overrides).items() if _names_file(key)}
        saved = find_run(path, named).config
        _check_agrees(path, saved, overrides)
        asked = {
            key.removeprefix("mesh."): value
            for key, value in overrides.items()
            if key.startswith("mesh.")
        }
        saved.mesh = ConfigDict({**saved.mesh, **asked})
        config = saved
    return Run(path, config, resumed)


def find_run(workdir: str | Path, named: Mapping[str, Any] | None = None) -> Run:
    """Return the run in a folder, whose files are taken for data of strangers.

    Args:
      workdir: the folder.
      named: files that the caller names, by dotted key: no others are read.
    """
    path = folders.local(workdir)
    if not _is_ours(path):
        raise RunError(f"--workdir must be the folder of a run, and there is none in {path}")
    mark, found = _read_mark(path), files.read_json(path / CONFIG)
    if digest(found) != mark["config"]:
        raise RunError(
            f"{path / CONFIG} is not what the run began with; restore it, or choose a new --workdir"
        )
    task, flat = found.get("task"), flatten(found)
    own = mark.get("more")  # The keys beyond those of the task's config.
    more = {k: x for k, x in flat.items() if isinstance(own, list) and k in own}
    try:
        fields.check(flat, fields.schema(task, more))
    except RunError as error:
        raise RunError(f"{path / CONFIG} is no config of a run: {error}") from None
    for key, value in flat.items():
        if _names_file(key) and value and (named or {}).get(key) != value:
            raise RunError(
                f"{path} was trained on the file {value!r:.300}, and only its owner can say that "
                f"it be read: name it again (--config.{key}, or --data or --tokenizer of "
                f"experiments.generate)"
            )
    return Run(path, ConfigDict(found), resumed=True)


def _names_file(key: str) -> bool:
    return key in ("data.path", "data.tokenizer")


def _is_ours(path: Path, config: ConfigDict | None = None) -> bool:
    """Return True if a folder holds a run, and False if it can become one.

    It can if a start that was cut off left the given config there, and nothing else.
    """
    if not path.exists():
        return False
    if not path.is_dir():
        raise RunError(f"--workdir must be a folder, and {path} is a file; choose another")
    files.check_tree(path)
    names = {each.name for each in path.iterdir() if not each.name.startswith(files.ASIDE)}
    names.discard(lock.NAME)
    if not names:
        return False
    if config is not None and names == {CONFIG}:
        try:
            if files.read_json(path / CONFIG) == config.to_dict():
                print(f"the start of {path} was cut off; it starts anew", flush=True)
                return False
        except RunError:
            pass
    try:
        if files.read_json(path / MARK).get("program") == PROGRAM:
            return True
        reason = f"{MARK} is not of {PROGRAM}"
    except RunError as error:
        reason = str(error)
    raise RunError(
        f"{path} is not empty and not a run of {PROGRAM} ({reason}); "
        f"nothing was touched; choose a new --workdir"
    )


def _read_mark(path: Path) -> dict[str, Any]:
    """Return the mark of a run, written when it began."""
    mark = files.read_json(path / MARK)
    if mark.get("format") != FORMAT:
        raise RunError(
            f"{path} is a run of another version of {PROGRAM}, of format {mark.get('format')!r:.50}"
            f" and not {FORMAT}; go on with that version, or choose a new --workdir"
        )
    for name in ("data", "config"):
        if not re.fullmatch(r"[\x20-\x7e]{1,200}", str(mark.get(name, ""))):
            raise RunError(f"{path / MARK} has no hash of the {name}; choose a new --workdir")
    return mark


def _check_agrees(path: Path, saved: ConfigDict, overrides: Mapping[str, Any]) -> None:
    had = flatten(saved.to_dict())
    wanted = flatten({k: v.to_dict() if hasattr(v, "to_dict") else v for k, v in overrides.items()})
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
