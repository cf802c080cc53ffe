"""The steps of a GPU day: each is a separate command with a time limit, most wanted first.

A command that crashes its process, as CUDA errors and XLA checks do, ends only its own step.
"""

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.gpu_day.results import benchmark_rows

CONTRACT = (
    "tests/kernels/test_cudnn_lowering.py", "tests/kernels/test_cudnn_packed.py",
    "tests/kernels/test_contract.py", "tests/kernels/test_extremes.py",
)  # fmt: skip
# Each third case of cuDNN, of which an ordinary run leaves most out.
ORACLE = ("tests/kernels/test_contract.py", "-m", "not grid", "-k", "cudnn")
# The same of flex, which `auto` takes once they pass.
FLEX = ("tests/kernels/test_contract.py", "-m", "not grid", "-k", "Hopper")
TESTS = {
    "contract": "Contract", "oracle": "cuDNN against the oracle", "flex": "flex against the oracle",
}  # fmt: skip
PEERS = ("jax-xla", "jax-cudnn", "tokamax", "fa4-jax", "torch-sdpa", "torch-flex")
OURS = ("ours", "ours-flex", "ours-reference", "ours-blockwise")
# 16 heads of 128 features, 16,384 tokens per batch.
LARGE = ("--heads=16", "--features=2048", "--tokens=16384")
SMALL = ("--heads=2", "--features=32", "--tokens=128")


class Step(NamedTuple):
    """One command.

    Attributes:
      name: the name of the step and of its folder.
      seconds: the time limit.
      arguments: the interpreter's arguments; FOLDER stands for the step's folder, and TOTAL for the
        seconds that it may plan to use.
      read: a function from the folder and the output to the result.
      precise: True if float32 matmuls must not use TF32.
    """

    name: str
    seconds: float
    arguments: tuple[str, ...]
    read: Callable[[Path, str], Any]
    precise: bool = False

    def command(self, folder: Path, seconds: float) -> list[str]:
        """Return the command for this folder and time limit."""
        total = max(1.0, 0.85 * seconds)
        filled = (x.replace("FOLDER", str(folder)) for x in self.arguments)
        return [sys.executable, *(x.replace("TOTAL", f"{total:.0f}") for x in filled)]


def plan(small: bool) -> list[Step]:
    """Return all steps, about 40 minutes together, or a minute if small."""
    return _small() if small else _large()


def _large() -> list[Step]:
    found = [
        _tests("contract", 200, CONTRACT), _tests("oracle", 200, ORACLE),
        _tests("flex", 800, FLEX),
    ]  # fmt: skip
    long, every = "--lengths=1024,4096,16384", (*OURS, *PEERS)
    for name, seconds, flags in (
        ("causal", 200, ("--masks=causal", long)),
        ("packed", 160, ("--masks=packed", "--lengths=4096,16384")),
        ("window", 100, ("--masks=causal", "--window=1024", "--lengths=16384")),
        ("groups", 80, ("--masks=causal", "--kv_heads=4", "--lengths=4096")),
        ("full", 80, ("--masks=full", "--lengths=4096")),
    ):
        found.append(_race(name, seconds, every, *LARGE, *flags, "--dtypes=bfloat16"))
    kernels, short = ("ours-reference", "ours-blockwise", "ours-cudnn"), "--lengths=256,512,1024"
    found += [
        _race("float32", 120, (*kernels, "jax-xla"), *LARGE, f"{short},2048,4096",
              "--masks=causal,full", "--dtypes=float32"),
        _race("short", 60, (*kernels, "jax-xla"), *LARGE, short, "--masks=causal",
              "--dtypes=bfloat16"),
        _race("float16", 60, ("ours", "jax-cudnn"), *LARGE, "--lengths=4096", "--masks=causal",
              "--dtypes=float16"),
        _race("long", 80, ("ours", "jax-cudnn", "torch-sdpa"), *LARGE, "--lengths=32768",
              "--masks=causal", "--dtypes=bfloat16"),
        _decode(180),
        _train(120, "--config.steps=300", "--config.batch_size=64", "--config.length=512",
               "--config.model.dtype=bfloat16"),
    ]  # fmt: skip
    return found


def _small() -> list[Step]:
    names = ("ours", "ours-reference", "ours-blockwise", "jax-xla", "jax-cudnn")
    return [
        _tests("contract", 120, ("tests/kernels/test_op_rewrite.py",)),
        _race("packed", 60, names, *SMALL, "--masks=packed", "--lengths=32", "--dtypes=bfloat16"),
        _race("float32", 60, names, *SMALL, "--masks=causal", "--lengths=16,64",
              "--dtypes=float32"),
        _decode(60, "--lengths=64", "--batch=2", "--heads=2", "--features=8"),
        _train(120, "--config.steps=4", "--config.batch_size=8", "--config.length=32",
               "--config.model.num_layers=1", "--config.evaluate_every=4"),
    ]  # fmt: skip


def _tests(name: str, seconds: float, chosen: tuple[str, ...]) -> Step:
    arguments = ("-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "--maxfail=50",
                 "--junitxml=FOLDER/tests.xml", *chosen)  # fmt: skip
    return Step(name, seconds, arguments, _read_tests, precise=True)


def _race(name: str, seconds: float, contestants: tuple[str, ...], *flags: str) -> Step:
    common = ("-m", "experiments.benchmark", "--parts=core", "--memory=none", "--no-extras",
              "--seconds=2", "--total=TOTAL", f"--contestants={','.join(contestants)}",
              "--workdir=FOLDER/results")  # fmt: skip
    return Step(name, seconds, (*common, *flags), benchmark_rows)


def _decode(seconds: float, *flags: str) -> Step:
    common = ("-m", "experiments.benchmark", "--decode", "--seconds=2", "--total=TOTAL",
              "--workdir=FOLDER/results")  # fmt: skip
    return Step("decode", seconds, (*common, *flags), benchmark_rows)


def _train(seconds: float, *flags: str) -> Step:
    arguments = ("-m", "experiments.train", "--config=configs/masked.py", "--workdir=FOLDER/run")
    sizes = dict(x.removeprefix("--config.").split("=") for x in flags)
    examples = (int(sizes["steps"]) - 1) * int(sizes["batch_size"])

    def read(folder: Path, said: str) -> dict[str, float]:
        del folder
        found = re.search(r"([\d.]+) s to compile, ([\d.]+) s to run", said)
        if found is None:
            raise ValueError("the trainer printed no duration")
        compiling, running = map(float, found.groups())
        rate = examples / max(running, 1e-3)
        return {"compile_seconds": compiling, "seconds": running, "examples_per_second": rate}

    return Step("train", seconds, (*arguments, *flags), read)


def _read_tests(folder: Path, said: str) -> dict[str, Any]:
    """Return the numbers of passed and skipped tests, and the names of failed ones."""
    del said
    suite = ET.parse(folder / "tests.xml").getroot()[0]
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    total, skipped = (int(suite.get(key, 0)) for key in ("tests", "skipped"))
    return {"passed": total - skipped - len(failed), "skipped": skipped, "failed": failed}
