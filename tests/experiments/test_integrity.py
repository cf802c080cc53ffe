"""Any change to a checkpoint is detected: it never loads wrong weights."""

import collections
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from experiments.runs import integrity
from experiments.runs.failures import RunError
from experiments.runs.record import Saved
from experiments.trainer.checkpoints import Checkpoints
from tests.experiments.checked import flat

# Failed reads leave coroutines that were never awaited.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
STEPS = (3, 6)


class State(struct.PyTreeNode):
    step: Any
    params: Any
    opt_state: Any
    key: Any


def state_of(step: int) -> State:
    """Return arrays of the kinds in a run: some in one chunk, some incompressible."""
    key = jax.random.key(step)
    params = {
        "kernel": jax.random.normal(key, (24, 8)),
        "bias": jnp.zeros(8),
        "half": jax.random.normal(key, (5, 3), jnp.bfloat16),
    }
    return State(jnp.int32(step), params, optax.adam(1.0).init(params), key)


class Run(NamedTuple):
    """The part of a program that `Checkpoints` uses, without a model."""

    saved: State

    def abstract_state(self) -> State:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.saved
        )


class Data:
    """An iterator with a position."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def log(step: int) -> dict[str, Any]:
    return {"rows": [{"step": step, "split": "test", "loss": 1 / step}], "pending": []}


def restore(folder: Path, read_only: bool = True) -> tuple[Saved | None, Data]:
    data = Data()
    with Checkpoints(folder, read_only=read_only) as checkpoints:
        return checkpoints.restore(Run(state_of(0)), data), data


def bits(tree: Any) -> dict[str, tuple[str, bytes]]:
    return {name: (str(x.dtype), np.asarray(x).tobytes()) for name, x in flat(tree).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    with Checkpoints(path) as checkpoints:
        for step in STEPS:
            checkpoints.save(step, state_of(step), Data(step), log(step))
    return path


def changes(path: Path, flips: int) -> Iterator[tuple[str, bytes | None]]:
    """Yield possible changes of a file: its new content, or None if it is removed."""
    good, rng = path.read_bytes(), random.Random(path.name)
    for bit in rng.sample(range(8 * len(good)), min(flips, 8 * len(good))):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(changed)
    yield "empty", b""
    yield "half", good[: len(good) // 2]
    yield "zeros", bytes(len(good))
    yield "gone", None


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize("flips", [1, 16])
def test_changed_file_never_alters_loaded_state(
    folder: Path, flips: int, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {step: bits(state_of(step)) for step in STEPS}
    found = collections.Counter()
    latest = folder / "checkpoints" / str(STEPS[-1])
    for path in sorted(p for p in latest.rglob("*") if p.is_file()):
        good = path.read_bytes()
        for name, content in changes(path, flips):
            path.unlink() if content is None else path.write_bytes(content)
            saved, data = restore(folder)
            said = capsys.readouterr().out.splitlines()
            case = f"{path.relative_to(folder)}: {name}"
            assert saved is not None, case
            assert bits(saved.state) == expected[saved.step], case
            assert (saved.log, data.at) == (log(saved.step), saved.step), case
            # Some files are not used, such as the shardings.
            assert len(said) == (saved.step != STEPS[-1]), case
            assert all(line.startswith("the checkpoint of step 6 is damaged: ") for line in said)
            found[saved.step] += 1
            path.write_bytes(good)
    assert restore(folder)[0].step == STEPS[-1]
    assert min(found[step] for step in STEPS) > flips


@pytest.mark.parametrize("item", ["state", "run", "."])
def test_damaged_checkpoint_is_set_aside_and_rewritten(
    folder: Path, tmp_path: Path, item: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for again in ("6", "6-2"):
        if again == "6":
            shutil.copytree(folder, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "6" / item)
        (tmp_path / "run" / "checkpoints" / "6").mkdir(exist_ok=True)
        with Checkpoints(tmp_path / "run") as checkpoints:
            saved = checkpoints.restore(Run(state_of(0)), Data())
            assert saved.step == 3
            checkpoints.save(6, state_of(6), Data(6), log(6))
        assert (tmp_path / "run" / "checkpoints.damaged" / again).is_dir()
        assert restore(tmp_path / "run")[0].step == 6
    assert len(capsys.readouterr().out.splitlines()) == 4


FORGED = {
    "log": [None, [], {}, {"rows": []}, {"rows": {}, "pending": []}, {"rows": [7], "pending": []},
            {"rows": [{"step": 6}], "pending": []}, {"rows": [], "pending": [{"loss": "x"}]},
            {"rows": [{"step": 6, "split": "test", "loss": "x"}], "pending": []},
            {"rows": [{"step": 6, "split": "test", "loss": ["x"]}], "pending": []},
            {"rows": [], "pending": [dict.fromkeys(("loss", "gradient_norm", "skipped"), [0.0] * n)
                                     for n in (1, 2)]}],
    "arrays": [None, [], {"step": 7}, 7],
    "data": [None, [], {}, {"at": "x"}, {"elsewhere": 6}, 7],
    "step": [None, "6", 7, {}],
}  # fmt: skip


@pytest.mark.parametrize("part", FORGED)
def test_record_of_wrong_structure_counts_as_damaged(
    folder: Path, tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The digest of the record is right."""
    shutil.copytree(folder, tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints" / "6" / "run").glob("metadata")
    good = json.loads(path.read_text())
    del good["digest"]
    for value in [*FORGED[part], "gone"]:
        record = good | {part: value}
        if value == "gone":
            del record[part]
        path.write_text(json.dumps(record | {"digest": integrity.digest(record)}))
        saved, data = restore(tmp_path / "run")
        assert (saved.step, data.at) == (3, 3), value
        assert "step 6 is damaged" in capsys.readouterr().out


def test_no_valid_checkpoint_raises_and_changes_nothing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    for step in STEPS:
        (tmp_path / "run" / "checkpoints" / str(step) / "run" / "metadata").write_text("{}")
    for _ in range(2):
        with pytest.raises(RunError, match="has no checkpoint that is whole; restore one"):
            restore(tmp_path / "run", read_only=False)
        assert not (tmp_path / "run" / "checkpoints.damaged").exists()
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "run" / "checkpoints.damaged")
    with pytest.raises(RunError, match="has no checkpoint that is whole"):
        restore(tmp_path / "run", read_only=False)
    assert restore(tmp_path / "empty", read_only=False)[0] is None


def test_checkpoint_of_another_model_is_not_damage(folder: Path) -> None:
    other = state_of(0).replace(params={"kernel": jnp.zeros((24, 9))})
    with pytest.raises(
        RunError, match=r"another model: params/bias is float32\[8\] there and miss"
    ):
        Checkpoints(folder, read_only=True).restore(Run(other), Data())


def test_nonfinite_parameters_are_not_saved(tmp_path: Path) -> None:
    state = state_of(1)
    state.params["bias"] = state.params["bias"].at[3].set(jnp.inf)
    expected = pytest.raises(RunError, match="params/bias is not finite at step 1: it was not")
    with Checkpoints(tmp_path) as checkpoints, expected:
        checkpoints.save(1, state, Data(), log(1))
    assert not list((tmp_path / "checkpoints").iterdir())


def test_last_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    losses = {1: 0.4, 2: 0.1, 3: None, 4: 0.3, 5: 0.2, 6: 0.5}
    rows = [{"step": s, "split": "test", "loss": [x, 1.0]} for s, x in losses.items()]
    with Checkpoints(tmp_path, keep_last=2, keep_best=1) as checkpoints:
        for step in losses:
            state = State(jnp.int32(step), {}, {}, jax.random.key(0))
            checkpoints.save(step, state, Data(), {"rows": rows[:step], "pending": []})
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [2, 5, 6]


def sums(x: Any) -> str:
    return integrity.checksums({"x": jnp.asarray(x)}).arrays["x"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool", "complex64"])
@pytest.mark.parametrize("on", ["host", "device"])
def test_checksum_depends_on_every_bit_and_index(
    dtype: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x = np.asarray(rng.integers(0, 2, (3, 4)), dtype)
    on_host = sums(x)
    if on == "device":
        monkeypatch.setattr(integrity, "_SMALL", 0)
    assert sums(x) == on_host
    flips = {on_host}
    for i in range(x.size):
        flipped = x.copy()
        view = flipped.view(np.uint8).reshape(-1)
        view[i * x.itemsize] ^= 1
        flips.add(sums(flipped))
    assert len(flips) == 1 + x.size
    a, b = np.zeros((2, 3), dtype), np.zeros((2, 3), dtype)
    a[0, 1] = b[1, 0] = 1
    assert sums(a) != sums(b)


@pytest.mark.slow
@pytest.mark.parametrize("small", [0, 2**18])
def test_checksum_does_not_depend_on_sharding(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "_SMALL", small)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.random.normal(jax.random.key(0), (8, 4, 3))
    tree = {"x": x, "keys": jax.random.split(jax.random.key(1), 8), "bits": x[..., 0] > 0}
    layouts = [
        jax.device_put(tree, NamedSharding(mesh, spec))
        for spec in (PartitionSpec(), PartitionSpec("a"), PartitionSpec(("b", "a")))
    ]
    layouts.append({**tree, "x": jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))})
    assert {json.dumps(integrity.checksums(each)) for each in layouts} == {
        json.dumps(integrity.checksums(tree))
    }
    assert integrity.checksums({"x": x.at[7, 3, 2].set(jnp.nan)}).not_finite == ["x"]


def test_checksums_are_those_of_every_jax() -> None:
    """A run may go on under another version of JAX."""
    x = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
    assert sums(x) == "8d126c4466e64633 float32[3, 4]"
    assert sums(jax.random.key(3)) == "b271819522ee7443 key<fry>[]"
