"""Odd command lines and configs are refused in one line, before a folder is created."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from experiments import tasks
from experiments.runs import checks, fields, settings
from experiments.runs.failures import RunError
from experiments.runs.fields import flatten
from experiments.trainer import loop

ROOT = Path(__file__).parent.parent.parent
DIGITS = ROOT / "configs" / "digits.py"
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
ABSURD = ("nan", "inf", "-inf", "1e400", "-1", "-0.5", "", "abc", "[1]", "None", str(2**70))


def read(*words: str) -> settings.Asked:
    return settings.read(["train", *words], DIGITS)


def refused(*words: str) -> str:
    with pytest.raises(RunError) as error:
        read(*words)
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_key_has_a_rule_that_accepts_its_value(path: Path) -> None:
    asked = read(f"--config={path}")
    keys = flatten(asked.config.to_dict())
    assert keys.keys() <= fields.TABLE.keys()
    assert all(fields.TABLE[key].about and fields.TABLE[key].rule for key in keys)
    told = settings.described(asked.config, asked.path)
    for key, value in keys.items():
        assert f"--config.{key}: {fields.TABLE[key].about}" in told
        assert f"(default: {value!r})" in told


def test_every_rule_belongs_to_a_config_key() -> None:
    configs = [read(f"--config={path}").config.to_dict() for path in CONFIGS]
    assert fields.TABLE.keys() == {key for config in configs for key in flatten(config)}


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_absurd_values_are_refused_for_every_key(path: Path) -> None:
    for key in flatten(read(f"--config={path}").config.to_dict()):
        for word in ABSURD:
            if key in ("data.path", "data.tokenizer") or (key == "mesh.data" and word == "-1"):
                continue
            if (key, word) == ("report_to", ""):
                continue
            line = refused(f"--config={path}", f"--config.{key}={word}")
            assert line.startswith(f"config.{key} must be "), line
            assert "got" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--config.seed=4294967296", "config.seed must be a whole number from 0 to 4,294,967,295"),
        ("--config.seed=4294967295 --config.seeds=2", r"got 4294967295 \+ 2; try config.seed="),
        ("--config.steps=0", "config.steps must be a whole number from 1 .*, got 0; try 1000"),
        ("--config.steps=1.5", "config.steps must be a whole number .*, got '1.5'"),
        ("--config.steps=true", "config.steps must be a whole number .*, got 'true'"),
        ("--config.steps", "Missing value for flag --config.steps"),
        ("--noconfig.steps", "config.steps must be .*, got --noconfig.steps; try --config.steps="),
        ("--config.batch_size=1099511627776", "config.batch_size must be a whole number"),
        ("--config.keep_last=0", "config.keep_last must be a whole number from 1"),
        ("--config.max_skipped=0", "config.max_skipped must be a whole number from 1"),
        ("--config.label_smoothing=1", r"config.label_smoothing must be a number in \[0, 1\)"),
        ("--config.report_to=foo", "config.report_to must be empty, or some of mlflow, wandb"),
        ("--config.report_to=wandb,foo", "config.report_to must be empty, or some of"),
        ("--config.model.features=1000000000", "config.model.features must be a whole number"),
        ("--config.model.num_layers=1000000", "config.model.num_layers must be a whole number"),
        ("--config.model.num_heads=5", "num_heads must divide config.model.features=64.* try 4"),
        ("--config.model.num_kv_heads=3", "num_kv_heads must divide .*num_heads=8, .* try 2"),
        ("--config.model.patch_size=3", "config.model.patch_size must be one of 1, 2, 4, 8"),
        ("--config.model.kernel=ring:foo", "config.model.kernel must be auto, or a kernel"),
        ("--config.optimizer.learning_rate=1e300", "learning_rate must be a number in"),
        ("--config.optimizer.learning_rate=0", r"learning_rate must be a number in \(0, 1000\]"),
        ("--config.optimizer.b1=1.5", r"config.optimizer.b1 must be a number in \[0, 1\)"),
        # It rounds to 1 in float32.
        ("--config.optimizer.b2=0.99999999999", r"optimizer.b2 must be a number in \[0, 1\)"),
        ("--config.optimizer.clip_norm=0", "config.optimizer.clip_norm must be"),
        ("--config.optimizer.warmup=1.5", r"config.optimizer.warmup must be a number in \[0, 1\]"),
        ("--config.task=foo", "config.task must be one of digits, masked, text, translation"),
        ("--config.task=text", "config.data.path is missing"),
        ("--config.mesh={}", "config.mesh is a group of keys, .* one by one: --config.mesh."),
        ("--config.model={'features':64}", "one by one: --config.model.activation=gelu"),
        ("--config.model", "config.model is a group of keys"),
        ("--config.=1", "the config has no key ''"),
        ("--config.steps.foo=1", "the config has no key 'steps.foo'"),
        ("--config.step=1", "no key 'step'; the nearest is 'steps'"),
        ("--config.steps=5 --config.steps=0", "config.steps must be .*, got 0"),
        ("--workdir runs/a --config.steps=0", "config.steps must be .*, got 0"),
        ("--config", "Missing value for flag --config"),
        ("--config=", "--config must name a file such as .*, got ''"),
        ("--config=configs", "--config must name a file such as .*, got 'configs'"),
        ("--config=/dev/zero", "--config must name a file such as"),
        ("--config=digit.py", "--config must name a file such as .*, got 'digit.py'"),
        ("--config=configs/masked.py --config.model.dtype=int8", "model.dtype must be one of"),
        ("--config=configs/masked.py --config.model.scan=3", "scan must be true or false, got '3'"),
        ("--config=configs/masked.py --noconfig.model.scan=1", "does not take an argument"),
        (
            "--config=configs/pydoc_lm.py --config.data.split=train",
            "split must be one of test, va",
        ),
        ("--config=configs/masked.py --config.model.remat=z,lsd", "or some of q, .*, got 'z,lsd'"),
        ("--config=configs/masked.py --config.model.remat=", "or some of q, k, .*, got ''"),
        ("--config=configs/masked.py --config.hidden=0", "config.hidden must be a number in"),
        ("--config=configs/pydoc_lm.py --config.length=0", "config.length must be a whole number"),
        ("--config=configs/dates.py --config.model.encoder_layers=0", "encoder_layers must be"),
    ],
)
def test_odd_command_lines_raise(words: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(RunError, match=message):
        read(*words.split())


def test_keys_are_set_by_every_form_of_flag() -> None:
    masked = f"--config={ROOT / 'configs' / 'masked.py'}"
    asked = read(
        "--workdir", "runs/a", "--config.steps", "7", masked, "-config.model.dropout_rate=0",
        "--config.model.remat", "--noconfig.model.scan", "extra", "--profile=5",
    )  # fmt: skip
    assert asked.rest == ["train", "--workdir", "runs/a", "extra", "--profile=5"]
    assert (asked.config.steps, asked.config.task) == (7, "masked")
    assert (asked.config.model.remat, asked.config.model.scan) == (True, False)
    assert type(asked.config.model.dropout_rate) is float
    assert read(masked, "--config.model.remat=z,offload:q").config.model.remat == "z,offload:q"
    assert read(masked, "--config.model.remat=1").config.model.remat is True
    # A config file given by flag overrides the run's config; the default does not.
    assert asked.overrides == flatten(asked.config.to_dict())
    assert read("--config.steps=7").overrides == {"steps": 7}


FILES = {
    "def get_config(:": "SyntaxError: .*line 1",
    "x = 1": "it has no get_config",
    "def get_config(): raise ValueError('a\\nb')": "ValueError: a b",
    "def get_config(): return {'task': 'digits'}": "must return a ConfigDict, got dict",
    "def get_config(): pass": "must return a ConfigDict, got NoneType",
    "import nothere": "No module named 'nothere'",
    "config.steps = True": "config.steps must be a whole number .*, got True",
    "config.steps = 2**70": "config.steps must be a whole number",
    "config.optimizer.b1 = float('nan')": "config.optimizer.b1 must be a number",
    "config.more = float('nan')": "config.more must be a finite number, got nan",
    "config.more = print": "config.more must be of numbers, texts, lists .* got a builtin",
    "config.more = {1}": "config.more must be of numbers, .* got a set",
    "import pathlib; config.more = pathlib.Path()": "config.more must be of numbers",
    "import datetime; config.more = datetime.date.today()": "config.more must be of numbers",
    "import numpy; config.more = numpy.int64(3)": "config.more must be of numbers, .* got a int64",
    "import numpy; config.more = numpy.arange(3)": "config.more must be of numbers",
    "config.more = 10**5000": "config.more must be of numbers, .* Exceeds the limit",
    "config.more = [1, [print]]": "config.more must be of numbers",
    "config.more = [float('nan')]": "config must hold finite numbers",
    "config.more = list(range(200_000))": "config must have at most 1,048,576 characters in JSON",
    "raise SystemExit(0)": "can't be read as a config: SystemExit: 0",
    "del config.keep_best": "config.keep_best is missing",
    "del config.mesh['fsdp']": "config.mesh.fsdp is missing",
    "del config['model']; config.model = 3": "config.model.activation is missing",
    "del config['task']": "config.task must be one of .*, got None",
}


@pytest.mark.parametrize("code", FILES)
def test_odd_config_files_raise(code: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(_config(code) if re.search(r"config[.\[]|Exit", code) else code)
    with pytest.raises(RunError, match=FILES[code]) as error:
        read(f"--config={path}")
    assert "\n" not in str(error.value)


def test_user_config_may_have_more_keys(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        _config("config.more = (1, (2,)); config.n = 3; config.optimizer.clip_norm = 1")
    )
    assert read(f"--config={path}").config.optimizer.clip_norm == 1
    config = read(
        f"--config={path}", "--config.more=(3,)", "--config.optimizer.clip_norm=0.5"
    ).config
    assert (config.more, config.optimizer.clip_norm) == ([3], 0.5)
    assert read(f"--config={path}").config.more == [1, [2]]
    assert "config.n must be a whole number, got 'x'; try 3" in refused(
        f"--config={path}", "--config.n=x"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--config.model.features=65536", "must fit the memory of .* GiB, got .* GiB; try"),
        ("--config.batch_size=2147483647", "must fit the memory of .* GiB, got .* GiB; try"),
        ("--config.model.kernel=flex", "kernel='flex' can't run this call"),
        ("--config=configs/masked.py --config.model.kernel=decode", "at most 64 queries, got 128"),
        ("--config=configs/masked.py --config.mesh.context=3", "counts 128, which does not divide"),
        ("--config=configs/pydoc_lm.py --config.data.stride=129", "stride must be in 1 … .*=128"),
        ("--config=configs/pydoc_lm.py --config.data.path=/dev/zero", "must be a file, got /dev"),
        ("--config=configs/dates.py --config.data.path=/dev/zero", "must be a file, got /dev/zero"),
    ],
)
def test_model_beyond_memory_is_refused_before_it_runs(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = read(*words.split()).config
    with pytest.raises(ValueError, match=message):
        _checked(config)


def test_model_within_memory_is_accepted(config: ConfigDict) -> None:
    _checked(config)


HELP = ("train", "generate", "look", "convert", "plan", "measure")


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("command", HELP)
def test_help_creates_no_files(command: str, tmp_path: Path) -> None:
    done = _call(command, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python -m experiments.{command}" in done.stdout
    assert command not in ("train", "plan") or "--config.steps: of training; " in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("command", "word", "message"),
    [
        ("train", "--profile=abc", "--profile must be a number of steps"),
        ("plan", "--topology=v5e:0x0", "--topology must be a generation of TPUs"),
        ("train", "--start_timeout=-1", "flag --start_timeout=-1: -1 is not a positive"),
        ("train", "--start_timeout=x", "--start_timeout=x: invalid"),
        ("train", "--workdir=", "--workdir must name a folder"),
        ("train", "--worker=a", "Unknown command line flag 'worker'"),
        ("train", "--config.report_to=foo", "config.report_to must"),
        ("train", "--config.steps=abc", "config.steps must be"),
        ("plan", "--config.steps=abc", "config.steps must be"),
        ("plan", "--workdir=", "--workdir must name a folder"),
        ("plan", "--most=0", "flag --most=0"),
        ("generate", "--seed=-1", "flag --seed=-1"),
        ("convert", "a", "must be two folders, SRC DST, got"),
    ],
)
def test_commands_refuse_in_one_line(command: str, word: str, message: str, tmp_path: Path) -> None:
    done = _call(command, word, cwd=tmp_path)
    assert done.returncode == 1
    *phases, line = done.stderr.splitlines()
    assert all(each.endswith(" …") or each.startswith("still ") for each in phases)
    assert line.startswith("error: ")
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_command_without_arguments_takes_none(tmp_path: Path) -> None:
    done = _call("measure", "bits", "now", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: unrecognized arguments: now; see --help"


def _config(code: str) -> str:
    return (
        "from configs import digits\n\n\ndef get_config():\n"
        f"    config = digits.get_config()\n    {code}\n    return config\n"
    )


def _checked(config: ConfigDict) -> None:
    checks.check_fits(loop.build(config, tasks.make(config)))


def _call(command: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{command}", *words], cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
