"""Real processes that train together, on ports of this machine."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from configs import digits
from experiments import tasks
from experiments.runs import folders
from experiments.runs.config import Asked, flatten
from experiments.tasks.task import fingerprint

ROOT = Path(__file__).parent.parent.parent
DEVICES = 2  # per process
PATIENCE = 600  # seconds; a quiet machine needs some 20


def settings(config: ConfigDict) -> list[str]:
    """Return the flags that turn the default config into this one."""
    default = flatten(digits.get_config())
    return [
        f"--config.{key}={value}" for key, value in flatten(config).items() if value != default[key]
    ]


def losses(rows: list[dict[str, Any]]) -> np.ndarray:
    """Return the losses of training in the rows of a log, [steps] or [steps, seeds]."""
    return np.asarray([row["loss"] for row in rows if row["split"] == "train"])


def begin(folder: Path, config: ConfigDict) -> Any:
    """Begin a run in a folder, as the command does, and return its task. Another may go on."""
    task = tasks.make(config)
    run = folders.open_run(str(folder), Asked(config, {}))
    run.begin(fingerprint(task))
    folders._locks.pop(run.path).release()
    return task


def call(command: str, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as a user without the devices of the tests."""
    env = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS" and "TPU" not in name}
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{command}", *words], cwd=cwd,
        env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


class Processes:
    """Running processes and their output."""

    def __init__(self, commands: Sequence[Sequence[str]], logs: Path) -> None:
        env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        env |= {"JAX_PLATFORMS": "cpu"}
        logs.mkdir(parents=True)
        self._logs = [logs / f"{i}.txt" for i in range(len(commands))]
        self.all = []
        for command, log in zip(commands, self._logs, strict=True):
            with log.open("w") as file:  # An unread pipe would fill up.
                self.all.append(
                    subprocess.Popen(
                        [sys.executable, *command], cwd=ROOT, env=env, stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip

    def said(self, i: int) -> str:
        return self._logs[i].read_text()

    def wait(self) -> list[int]:
        """Return the exit codes."""
        end = time.monotonic() + PATIENCE
        return [process.wait(max(0.0, end - time.monotonic())) for process in self.all]

    def end(self, code: int = 0) -> list[str]:
        """Wait, check the exit codes, and return what each process said."""
        codes, said = self.wait(), [self.said(i) for i in range(len(self.all))]
        assert codes == [code] * len(said), "\n".join(said)
        return said

    def until(self, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not happened():
            assert all(process.poll() is None for process in self.all), self.said(0)
            assert time.monotonic() < end, self.said(0)
            time.sleep(0.05)


@contextlib.contextmanager
def together(
    count: int,
    logs: Path,
    *arguments: str,
    each: Callable[[int], Sequence[str]] = lambda i: (),
) -> Iterator[Processes]:
    """Run `count` processes of the command, with shared arguments and individual ones.

    All of them have ended when the context exits.
    """
    address = free_address()
    commands = [
        [
            "-m", "experiments.train", "--distributed", f"--coordinator_address={address}",
            f"--num_processes={count}", f"--process_id={i}",
            f"--config.mesh.force_host_devices={DEVICES}", *arguments, *each(i),
        ]
        for i in range(count)
    ]  # fmt: skip
    with started(commands, logs) as processes:
        yield processes


def free_address() -> str:
    """Return an address of this machine with a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@contextlib.contextmanager
def started(commands: Sequence[Sequence[str]], logs: Path) -> Iterator[Processes]:
    """Run a process of each command. All of them have ended when the context exits."""
    processes = Processes(commands, logs)
    try:
        yield processes
    finally:
        for process in processes.all:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
