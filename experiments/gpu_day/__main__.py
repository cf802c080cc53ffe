"""Finds out on a GPU what can't be found out without: for whoever has one, and 25 minutes.

    python -m experiments.gpu_day --workdir=runs/h100
    python -m experiments.gpu_day --workdir=runs/h100    # again: what failed, or was not begun
    python -m experiments.gpu_day --small                # a minute, anywhere: to try the command

The kernels' tests against the float64 oracle, cuDNN's contract among them, float32 products as
such, not TF32; attention timed beside jax.nn, tokamax and PyTorch where those are installed
(pip install -e '.[peers]'); decoding against the memory's bandwidth; the trainer's examples a
second; and from the times, as a diff, the length up to which `auto` should take plain einsums. It
takes pip install -e '.[test,cuda]'.

Everything goes to --workdir: report.md, day.json, and a folder for each step. What fails is said in
the report, and ends nothing else.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.gpu_day import results, steps
from experiments.gpu_day.steps import Step
from experiments.phases import Phase
from experiments.runs import files, folders
from experiments.runs.failures import RunError

TOTAL = 25 * 60.0
GRACE = 20.0  # seconds in which a step that is told to end may write what it has
MOST = 2**26  # bytes of day.json: hundreds of rows
DAMAGED = "damaged"
_MACHINE = (
    "import json; from experiments.benchmark import machine; print(json.dumps(machine.describe()))"
)


def main(argv: Sequence[str]) -> None:
    """Runs what has not been run, and writes the report after each step."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_day", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--workdir", help="new, or of a day to go on with")
    parser.add_argument("--small", action="store_true", help="tiny cases, on any machine")
    parser.add_argument("--total", type=_seconds, default=TOTAL, help="seconds; 1500 unless said")
    flags = parser.parse_args(argv)
    try:
        unsaid = flags.workdir is None
        folder = folders.new_folder("gpu-day") if unsaid else folders.local(flags.workdir)
        day = _opened(folder, flags.small)
    except RunError as error:
        sys.exit(f"error: {error}")
    _write(folder, day)
    end = time.perf_counter() + flags.total
    for step in steps.plan(flags.small):
        before = day["steps"].get(step.name, {"status": "", "result": None})
        if before["status"] == "ok":
            print(f"{step.name}: was done before")
            continue
        with Phase(step.name):
            found = run(step, folder, end - time.perf_counter())
        if found["result"] is not None or before["result"] is None:  # Else what there was stays.
            day["steps"][step.name] = found
        _write(folder, day)
        print(f"{step.name}: {found['status']}, {found['seconds']:.0f} s {found['reason']}")
    _write(folder, day)
    print(f"report.md and day.json are in {folder}")


def _opened(folder: Path, small: bool) -> dict[str, Any]:
    """The day so far, of this machine.

    Raises:
      RunError: if the folder holds something else, or there is no GPU.
    """
    machine = json.loads(_output([sys.executable, "-c", _MACHINE]))
    if machine["platform"] != "gpu" and not small:
        raise RunError(
            f"needs an NVIDIA GPU, this is {machine['platform']}; --small runs anywhere (where "
            "there is one, JAX sees it after pip install -e '.[test,cuda]')"
        )
    path, new = folder / "day.json", {"machine": machine, "small": small, "steps": {}}
    if not os.path.lexists(path):
        folders.result_folder(folder, "gpu-day").mkdir(parents=True, exist_ok=True)
        return new
    try:
        day = files.read_json(path, MOST)
        _check(path, day)
    except RunError as error:
        place = _set_aside(folder)
        print(f"{error}; all that was there is in {place} now, and the day begins anew")
        return new
    if (day["machine"]["device"], day["small"]) != (machine["device"], small):
        raise RunError(
            f"--workdir={folder} is of {day['machine']['device']}, small={day['small']}, this is "
            f"{machine['device']}, small={small}; choose another"
        )
    return day


def _check(path: Path, day: dict[str, Any]) -> None:
    """Refuses what is no day.

    Raises:
      RunError: if no report can be written of it.
    """
    try:
        page(day)
        if not isinstance(day["small"], bool):
            raise TypeError("small is neither true nor false")
    except Exception as error:  # of JSON that may be anything
        reason = (str(error).splitlines() or [""])[0][:200]
        raise RunError(f"{path} is of no day: {type(error).__name__}: {reason}") from None


def _set_aside(folder: Path) -> Path:
    """Moves all that the folder holds, day.json last, to a new one in it."""
    place, again = folder / DAMAGED, 2
    while place.exists():
        place, again = folder / f"{DAMAGED}-{again}", again + 1
    place.mkdir()
    held = sorted(folder.iterdir(), key=lambda path: path.name == "day.json")
    for path in held:
        if not path.name.startswith(DAMAGED):
            path.rename(place / path.name)
    return place


def run(step: Step, folder: Path, left: float) -> dict[str, Any]:
    """Runs a step in a new folder, and reads what it has left, whatever became of it."""
    if left < 1:
        return {"status": "not begun", "seconds": 0.0, "reason": "no time left", "result": None}
    place = folder / step.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    seconds, start = min(step.seconds, left), time.perf_counter()
    status, reason = _ended(step.command(place, seconds), place / "log.txt", seconds, step.precise)
    said = (place / "log.txt").read_text(errors="replace")
    try:
        result = step.read(place, said)
    except Exception as error:  # of what a command that was cut off has left: anything
        result, status = None, "failed" if status == "ok" else status
        reason = reason or f"{type(error).__name__}: {error}"
    return {
        "status": status, "seconds": time.perf_counter() - start, "reason": reason,
        "result": result,
    }  # fmt: skip


def _ended(command: list[str], log: Path, seconds: float, precise: bool) -> tuple[str, str]:
    """How a command ended, and why if not well."""
    env = _environment() | ({"JAX_DEFAULT_MATMUL_PRECISION": "highest"} if precise else {})
    with log.open("w") as file:
        # What a shell starts in the background ignores interrupts, and so would a step.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(
                command, cwd=results.ROOT, env=env, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        finally:
            signal.signal(signal.SIGINT, before)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            return "ended", f"took more than {seconds:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return ("ok", "") if code == 0 else ("failed", f"exit status {code}: {''.join(last)[:200]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a step and what it has started; pytest writes what it has when it is interrupted."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _output(command: list[str]) -> str:
    done = subprocess.run(
        command, cwd=results.ROOT, env=_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = "".join(done.stderr.strip().splitlines()[-1:])
        raise RunError(f"JAX does not start here: {last}")
    return done.stdout.splitlines()[-1]


def _environment() -> dict[str, str]:
    """Steps leave the GPU's memory to other libraries, and take one GPU of several.

    What they time are calls without a mesh, which JAX would divide between all.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {**os.environ, **memory, "CUDA_VISIBLE_DEVICES": first}


def _write(folder: Path, day: dict[str, Any]) -> None:
    files.write(folder / "day.json", json.dumps(day, indent=1) + "\n")
    files.write(folder / "report.md", page(day))


def page(day: dict[str, Any]) -> str:
    """The report, of what there is so far."""
    machine, found = day["machine"], day["steps"]
    versions = ", ".join(f"{name} {x}" for name, x in machine["versions"].items() if x)
    parts = [f"# {machine['device']}", f"{machine['cpu']}, Python {machine['python']}, {versions}."]
    lines = ["| step | status | seconds | |", "|---|---|---|---|"]
    for name, step in found.items():
        reason = step["reason"].replace("|", "/")
        lines.append(f"| {name} | {step['status']} | {step['seconds']:.0f} | {reason} |")
    parts.append("\n".join(lines))
    rows: list[Any] = []
    for name, step in found.items():
        result = step["result"]
        if not result:
            continue
        if name in steps.TESTS:
            counts = f"{result['passed']} passed, {result['skipped']} skipped"
            parts += [f"## {steps.TESTS[name]}\n\n{counts}, {len(result['failed'])} failed.",
                      "\n".join(f"- {test}" for test in result["failed"])]  # fmt: skip
        elif name == "train":
            parts.append("## Trainer\n\n{examples_per_second:,.0f} examples/s.".format(**result))
        elif name == "decode":
            parts.append(f"## Decoding\n\n{results.decode_table(result)}")
        else:
            rows += result
            parts.append(f"## {name}, milliseconds\n\n{results.core_table(result)}")
    parts += ["## What `auto` should take", *_advice(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _advice(rows: list[Any]) -> list[str]:
    measured = results.limit(rows)
    if measured is None:
        return ["Not measured."]
    where = f"up to T = {measured:,}" if measured else "at no length that was measured"
    text = f"In float32 `reference` beats `blockwise` {where}."
    diff = results.proposal(rows)
    return [text, f"```diff\n{diff}```" if diff else "", *results.slower_cudnn(rows)]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return seconds


if __name__ == "__main__":
    # So that the step that runs is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main(sys.argv[1:])
