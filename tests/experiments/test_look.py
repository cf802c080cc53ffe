"""The command that shows the heads of a run, or of a Hugging Face folder, on a prompt."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.common.failures import RunError
from experiments.trained import heads
from tests.experiments.launch import call
from tests.experiments.test_pretrained import QWEN, folder_of
from tests.interop.test_published_checkpoints import BERT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(QWEN, tmp_path_factory.mktemp("qwen") / "model")


def read(path: Path) -> dict[str, Any]:
    (text,) = re.findall(r'id="data">(.*?)</script>', path.read_text())
    return json.loads(text)


def test_a_folder_is_shown_on_two_prompts(qwen: Path, tmp_path: Path) -> None:
    out, png = tmp_path / "look.html", tmp_path / "heads.png"
    heads.write(heads.open_folder(str(qwen)), "12 7 40", "12 9 40", out, png)
    data = read(out)
    assert data["runs"] == ["12 7 40", "12 9 40"]
    assert data["tokens"] == [["12", "7", "40"], ["12", "9", "40"]]
    assert [layer["shape"] for layer in data["layers"]] == [[4, 3, 3]] * 2
    measures = {x["name"]: x["values"] for x in data["measures"]}
    assert [*measures][:2] == ["entropy", "max logit"]
    assert {*measures} > {"previous", "first", "duplicate", "induction"}
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="choose prompts of the same number of tokens"):
        heads.write(heads.open_folder(str(qwen)), "1 2 3", "1 2", out, None)
    with pytest.raises(RunError, match="must hold a decoder, got a"):
        heads.open_folder(str(folder_of(BERT, tmp_path / "bert")))


@pytest.mark.parametrize("flag", ["--out={}", "--png={}/file/x.png"])
def test_outputs_are_tried_before_the_work(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = call("look", "--model=none", "--prompt=1", flag.format(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("; choose another")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


DIGITS = {"steps": 2, "evaluate_every": 2, "checkpoint_every": 2, "mesh.data": 1}
TEXT = DIGITS | {
    "length": 16, "batch_size": 8, "data.stride": 8, "model.features": 32, "model.mlp_dim": 64,
    "model.num_layers": 2, "model.scan": True,
}  # fmt: skip


@pytest.mark.parametrize("name", ["pydoc_lm", "digits"])
def test_a_run_is_shown(name: str, tmp_path: Path) -> None:
    run, out = f"--workdir={tmp_path / 'run'}", tmp_path / "look.html"
    small = DIGITS if name == "digits" else TEXT
    flags = [f"--config.{key}={value}" for key, value in small.items()]
    done = call("train", run, f"--config=configs/{name}.py", *flags)
    assert done.returncode == 0, done.stderr
    prompts = ["--prompt=7", "--beside=8"] if name == "digits" else ["--prompt=é </script>"]
    done = call("look", run, *prompts, f"--out={out}")
    assert done.stdout.splitlines() == [str(out)], done.stderr
    data = read(out)
    measures = {x["name"]: x["values"] for x in data["measures"]}
    if name == "digits":
        assert data["runs"] == ["7", "8"]
        assert data["tokens"][0][:5] == ["0,0", "0,1", "0,2", "0,3", "1,0"]
        assert [*measures] == ["entropy", "max logit"]
        said = call("look", run, "--prompt=360", f"--out={out}").stderr.splitlines()[-1]
        assert "--prompt must be the number of a test image, 0 … 359, got '360'" in said
    else:
        assert data["tokens"][0] == ["\n", r"\xc3", r"\xa9", *" </script>"]
        layers = [layer["name"] for layer in data["layers"]]
        assert layers == [f"decoder/layers[{i}]/attention" for i in range(2)]
        assert np.shape(measures["max logit"]) == (1, 2, 4)
