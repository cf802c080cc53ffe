"""The command that shows the heads of a run, or of a Hugging Face folder, on a prompt."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.runs.failures import RunError
from experiments.trained import heads
from flax_mha import Capture, analysis, interop
from flax_mha.taps import sown
from tests.experiments.test_pretrained import BERT, QWEN, folder_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(QWEN, tmp_path_factory.mktemp("qwen") / "model")


def run_qwen(folder: Path, tokens: Any) -> Any:
    model, variables = interop.load(folder)
    watched = analysis.watch(model, Capture(("weights",)))
    return watched.apply(variables, jnp.asarray(tokens), mutable="intermediates")[1]


def read(path: Path) -> dict[str, Any]:
    (text,) = re.findall(r'id="data">(.*?)</script>', path.read_text())
    return json.loads(text)


def test_a_folder_is_shown_on_two_prompts(qwen: Path, tmp_path: Path) -> None:
    out, png = tmp_path / "look.html", tmp_path / "heads.png"
    heads.write(heads.open_folder(str(qwen)), "12 7 40", "12 9 40", out, png)
    data = read(out)
    assert data["runs"] == ["12 7 40", "12 9 40"]
    assert [names[0] for names in data["tokens"]] == [["12", "7", "40"], ["12", "9", "40"]]
    assert [layer["shape"] for layer in data["layers"]] == [[4, 3, 3]] * 2
    names = [x["name"] for x in data["measures"]]
    assert names == [
        "entropy",
        "max logit",
        "attribution",
        "previous",
        "first",
        "duplicate",
        "induction",
    ]
    weights = sown.find_weights(run_qwen(qwen, [[12, 7, 40]]))
    wanted = [(x[:, 1, 0] + x[:, 2, 1]) / 2 for x in weights.values()]
    np.testing.assert_allclose(data["measures"][3]["values"], [wanted], rtol=1e-5)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_attribution_is_the_slope_of_the_logit_in_a_head_mask(qwen: Path) -> None:
    model, variables = interop.load(qwen)
    batch = jnp.array([[12, 7, 40, 3]], jnp.int32)
    found = heads.attribute(model, variables, batch)
    top = int(model.apply(variables, batch)[0, -1].argmax())

    @jax.jit
    def logit(masks: jax.Array) -> jax.Array:
        return model.apply(variables, batch, head_mask=[*masks])[0, -1, top]

    slopes = np.zeros((2, 4))
    for layer, head in np.ndindex(2, 4):
        step = jnp.zeros((2, 4)).at[layer, head].set(0.02)
        slopes[layer, head] = (logit(1 + step) - logit(1 - step)) / 0.04
    assert np.abs(slopes).max() > 0.01
    np.testing.assert_allclose(np.stack(found), slopes, atol=2e-3, rtol=0.02)


def test_what_cannot_be_shown_is_refused(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose prompts of the same number of tokens"):
        heads.write(heads.open_folder(str(qwen)), "1 2 3", "1 2", tmp_path / "x.html", None)
    with pytest.raises(RunError, match="must hold a decoder, got a"):
        heads.open_folder(str(folder_of(BERT, tmp_path / "bert")))


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--out={tmp}", "got {tmp}: not a regular file"),
        ("--out=/proc/x/y.html", "got /proc/x/y.html: No such file or directory"),
        ("--png=/etc", "got /etc: not a regular file"),
        ("--png=/dev/full", "got /dev/full: not a regular file"),
        ("--png={tmp}/file/x.png", "got {tmp}/file/x.png: "),
    ],
)
def test_outputs_are_tried_before_the_work(flag: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flag, reason = flag.format(tmp=tmp_path), reason.format(tmp=tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "experiments.look", "--model=none", "--prompt=1", flag], cwd=ROOT,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"must be a file that can be written, {reason}" in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_is_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def call(program: str, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", f"experiments.{program}", f"--workdir={run}", *words],
            cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    small = {
        "length": 16, "batch_size": 8, "steps": 2, "evaluate_every": 2, "data.stride": 8,
        "checkpoint_every": 2, "model.features": 32, "model.mlp_dim": 64, "model.num_layers": 2,
        "mesh.data": 1, "model.scan": True,
    }  # fmt: skip
    call("train", "--config=configs/pydoc_lm.py", *(f"--config.{k}={v}" for k, v in small.items()))
    out = tmp_path / "look.html"
    said = call("look", "--prompt=é </script>", f"--out={out}", f"--png={tmp_path / 'x'}")
    assert said.splitlines() == [str(out), str(tmp_path / "x")]
    assert (tmp_path / "x").read_bytes().startswith(b"\x89PNG")
    data = read(out)
    assert data["tokens"][0][0] == ["\n", r"\xc3", r"\xa9", *" </script>"]
    layers = [layer["name"] for layer in data["layers"]]
    assert layers == [f"decoder/layers[{i}]/attention" for i in range(2)]
    measures = {x["name"]: x["values"] for x in data["measures"]}
    assert np.abs(measures["attribution"]).max() > 0
    assert np.shape(measures["max logit"]) == (1, 2, 4)


@pytest.mark.sampled(0, slow=0.3)
def test_the_first_run_of_the_readme_is_shown(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "look.html"

    def call(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", f"experiments.{program}", f"--workdir={run}", *words],
            cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    small = {"steps": 2, "evaluate_every": 2, "checkpoint_every": 2, "mesh.data": 1}
    done = call("train", *(f"--config.{key}={value}" for key, value in small.items()))
    assert done.returncode == 0, done.stderr
    done = call("look", "--prompt=7", "--beside=8", f"--out={out}")
    assert done.returncode == 0, done.stderr
    data = read(out)
    assert data["runs"] == ["7", "8"]
    assert data["tokens"][0][0][:5] == ["0,0", "0,1", "0,2", "0,3", "1,0"]
    assert [x["name"] for x in data["measures"]] == ["entropy", "max logit", "attribution"]
    assert np.abs(data["measures"][2]["values"]).max() > 0
    done = call("look", "--prompt=360", f"--out={out}")
    assert done.stderr.splitlines()[-1].endswith(
        "--prompt must be the number of a test image, 0 … 359, got '360'"
    )
