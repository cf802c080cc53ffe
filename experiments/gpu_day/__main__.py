"""Run all measurements that need a GPU, in 40 minutes.

    python -m experiments.gpu_day --workdir=runs/h100
    python -m experiments.gpu_day --workdir=runs/h100    # again: retry failed and missing steps
    python -m experiments.gpu_day --small                # a minute on any machine, to try it

The steps are: the kernels' tests against the float64 oracle, including the contracts of cuDNN and
flex, with float32 matmuls instead of TF32; attention timed beside jax.nn, and tokamax, fa4-jax and
PyTorch if installed (pip install -e '.[peers]', pip install fa4-jax); decoding against the memory's
bandwidth; the trainer's examples per second; and, as diffs, the length limit for plain einsums in
`auto`, and the GPUs on which it takes flex. The command needs pip install -e '.[test,cuda]'.

Results go to --workdir: report.md, day.json, and a folder for each step. The report names failed
steps, and the others run anyway.
"""

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
from experiments.runs import command, files, folders
from experiments.runs.failures import RunError

TOTAL = 40 * 60.0
GRACE = 20.0  # seconds for an interrupted step to write its results
MOST = 2**26  # bytes of day.json: hundreds of rows
DAMAGED = "damaged"
_MACHINE = (
    "import json; from experiments.benchmark import machine; print(json.dumps(machine.describe()))"
)


def main(argv: Sequence[str]) -> None:
    """Run the missing steps, and write the report after each."""
    parser = command.Parser(__doc__)
    parser.add_argument("--workdir", help="a new folder, or one of an interrupted day to resume")
    parser.add_argument("--small", action="store_true", help="tiny cases, on any machine")
    parser.add_argument(
        "--total",
        type=command.seconds,
        default=TOTAL,
        help="the time limit (default: 2400 s)",
    )
    flags = parser.parse_args(argv)
    unsaid = flags.workdir is None
    folder = folders.new_folder("gpu-day") if unsaid else folders.local(flags.workdir)
    day = _opened(folder, flags.small)
    _write(folder, day)
    end = time.perf_counter() + flags.total
    for step in steps.plan(flags.small):
        before = day["steps"].get(step.name, {"status": "", "result": None})
        if before["status"] == "ok":
            print(f"{step.name}: was done before")
            continue
        with Phase(step.name):
            found = run(step, folder, end - time.perf_counter())
        if (
            found["result"] is not None or before["result"] is None
        ):  # Otherwise keep the earlier result.
            day["steps"][step.name] = found
        _write(folder, day)
        print(f"{step.name}: {found['status']}, {found['seconds']:.0f} s {found['reason']}")
    _write(folder, day)
    print(f"report.md and day.json are in {folder}")


def _opened(folder: Path, small: bool) -> dict[str, Any]:
    """Return the day so far, on this machine."""
    machine = json.loads(_output([sys.executable, "-c", _MACHINE]))
    if machine["platform"] != "gpu" and not small:
        raise RunError(
            f"needs an NVIDIA GPU, this is {machine['platform']}; --small runs anywhere (if there "
            "is one, run pip install -e '.[test,cuda]')"
        )
    path, new = folder / "day.json", {"machine": machine, "small": small, "steps": {}}
    if not os.path.lexists(path):
        folders.result_folder(folder, "gpu-day")
        return new
    try:
        day = files.read_json(path, MOST)
        _check(path, day)
    except RunError as error:
        place = _set_aside(folder)
        print(f"{error}; its contents are in {place} now, and the day starts again")
        return new
    if (day["machine"]["device"], day["small"]) != (machine["device"], small):
        raise RunError(
            f"--workdir={folder} must be of this machine and size, {machine['device']} and "
            f"small={small}, got {day['machine']['device']}, small={day['small']}; choose another"
        )
    return day


def _check(path: Path, day: dict[str, Any]) -> None:
    """Check that the contents are a day."""
    try:
        page(day)
        if not isinstance(day["small"], bool):
            raise TypeError("small is neither true nor false")
    except Exception as error:  # the JSON may hold anything
        reason = (str(error).splitlines() or [""])[0][:200]
        raise RunError(f"{path} is not a valid day: {type(error).__name__}: {reason}") from None


def _set_aside(folder: Path) -> Path:
    """Move the folder's contents, day.json last, to a new folder in it."""
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
    """Run a step in a new folder, and read its results, whatever its outcome."""
    if left < 1:
        return {"status": "not begun", "seconds": 0.0, "reason": "no time left", "result": None}
    place = folder / step.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    seconds, start = min(step.seconds, left), time.perf_counter()
    status, reason = _run_command(
        step.command(place, seconds), place / "log.txt", seconds, step.precise
    )
    said = (place / "log.txt").read_text(errors="replace")
    try:
        result = step.read(place, said)
    except Exception as error:  # an interrupted command may leave anything
        result, status = None, "failed" if status == "ok" else status
        reason = reason or f"{type(error).__name__}: {error}"
    return {
        "status": status, "seconds": time.perf_counter() - start, "reason": reason,
        "result": result,
    }  # fmt: skip


def _run_command(command: list[str], log: Path, seconds: float, precise: bool) -> tuple[str, str]:
    """Return the status of a command, and the reason if it failed."""
    env = _environment() | ({"JAX_DEFAULT_MATMUL_PRECISION": "highest"} if precise else {})
    with log.open("w") as file:
        # Background jobs of a shell ignore interrupts, and a step would inherit that.
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
    """End a step and its processes. Pytest writes its results when interrupted."""
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
    """Return an environment with one GPU, whose memory JAX does not preallocate.

    The steps time calls without a mesh, which JAX would shard over all GPUs.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {**os.environ, **memory, "CUDA_VISIBLE_DEVICES": first}


def _write(folder: Path, day: dict[str, Any]) -> None:
    files.write(folder / "day.json", json.dumps(day, indent=1) + "\n")
    files.write(folder / "report.md", page(day))


def page(day: dict[str, Any]) -> str:
    """Return the report of the results so far."""
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
    if diff := results.flex_proposal(machine["device"], found.get("flex", {}).get("result")):
        parts.append(f"```diff\n{diff}```")
    return "\n\n".join(part for part in parts if part) + "\n"


def _advice(rows: list[Any]) -> list[str]:
    measured = results.limit(rows)
    if measured is None:
        return ["Not measured."]
    where = f"up to T = {measured:,}" if measured else "at no length that was measured"
    text = f"In float32 `reference` beats `blockwise` {where}."
    diff = results.proposal(rows)
    return [text, f"```diff\n{diff}```" if diff else "", *results.slower_cudnn(rows)]


if __name__ == "__main__":
    # End the running step too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main(sys.argv[1:])
