"""Attention next to other libraries: the command, its measurements, and equal results."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.common.failures import RunError
from experiments.measure import __main__ as measure
from experiments.measure import timing
from experiments.measure.peers import contestants, fresh
from experiments.measure.peers.cases import Case
from experiments.measure.peers.contestants import CONTESTANTS
from experiments.measure.timing import Work
from flax_mha import dot_product_attention
from tests.support.oracle import error

SMALL = Case("layer", "backward", "causal", B=2, T=12, N=2, D=16)


@pytest.fixture(autouse=True)
def _as_users_run() -> Iterator[None]:
    """Allow implicit promotion, which other libraries rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.sampled(0)
def test_peers_write_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure.main([
        "peers", "--lengths=16,32", "--heads=2", "--features=16", "--tokens=32", "--seconds=0.02",
        "--dtypes=float32", "--memory=none", "--parts=layer,core,step", "--masks=full",
        "--contestants=ours,linen,jax-xla,ours-prompt", f"--workdir={tmp_path}",
    ])  # fmt: skip
    assert (tmp_path / "table.md").read_text().strip() in capsys.readouterr().out
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    # Two lengths and passes, each with 2 contestants; a step has 3 and no passes.
    assert len(rows) == 4 * (2 + 2) + 2 * 3
    for row in rows:
        assert 0 < row["q1"] <= row["median"] <= row["q3"]
        assert (row["tokens"] > 0) == (row["part"] == "step")
        base = contestants.BASELINES[row["part"]]
        assert (row["ratio"] == 1) if row["contestant"] == base else row["ratio"] > 0


@functools.lru_cache
def outcome(name: str, case: Case) -> list[np.ndarray]:
    """Return the output, the gradients of the inputs, and the norm of those of parameters."""
    result = contestants.build(name, case).call()
    arrays = [x.detach().float().numpy() if hasattr(x, "detach") else np.float32(x)
              for x in jax.tree.leaves(result)]  # fmt: skip
    inputs = len(case.inputs()) if case.backward else 0
    end = len(arrays) - inputs
    return [arrays[0], *arrays[end:], np.sqrt(sum(np.square(x).sum() for x in arrays[1:end]))]


@pytest.mark.sampled(0.012)
@pytest.mark.parametrize(
    ("mask", "dtype"), [("causal", "float32"), ("full", "float32"), ("causal", "bfloat16")]
)
@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part in ("layer", "core") for name in CONTESTANTS[part]]
)
def test_contestants_agree(part: str, name: str, mask: str, dtype: str) -> None:
    """Outputs and gradients are equal, so the same computation is timed."""
    case = dataclasses.replace(SMALL, part=part, mask=mask, dtype=dtype)
    row: dict[str, Any] = {}
    with timing.noted(row):
        found = outcome(name, case)
    if row["status"] == "refused":
        pytest.skip(row["reason"])
    assert row == {"status": "ok"}
    expected = outcome(contestants.BASELINES[part], case)
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    for one, wanted in zip(found, expected, strict=True):
        assert error(one, wanted) < tolerance


def test_failed_contestants_say_why() -> None:
    def absent() -> Work:
        raise ModuleNotFoundError(name="keras")

    q, calls = jax.numpy.ones((1, 4, 2, 8)), iter([1])
    builds = {
        "absent": absent,
        "refusing": lambda: Work(lambda: dot_product_attention(q, q, q, kernel="splash")),
        "fragile": lambda: Work(lambda: next(calls)),  # fails in its second call
    }
    found = timing.race(builds, 1, 1.0)
    assert {name: timing.cells(row)[0] for name, row in found.items()} == {
        "absent": "refused: keras is not installed",
        "refusing": "refused: runs on TPU only, this is cpu",
        "fragile": "failed: StopIteration",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads=3"], "--features must be a multiple of --heads, got 512 and 3; choose another"),
        (["--parts=core", "--contestants=equinox"], "--contestants must name one that takes part"),
    ],
)
def test_bad_flags_give_clear_errors(words: list[str], message: str) -> None:
    with pytest.raises(RunError, match=message):
        measure.main(["peers", *words])


def test_contestants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = [], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def sleep(name: str, seconds: float) -> None:
        log.append(name)
        now[0] += seconds

    calls = {name: functools.partial(sleep, name, 0.3 if name == "c" else 0.03) for name in "abc"}
    builds = {name: functools.partial(Work, call) for name, call in calls.items()}
    found = timing.race(builds, rounds=3, seconds=0.9, baseline="c")
    # Two calls each to compile and to estimate the time. Then each leads a round, but a call of c
    # takes its share of 0.3 seconds.
    assert "".join(log) == "aabbcc" + "abc" + "ba" + "ab"
    assert [found[name]["rounds"] for name in "abc"] == [3, 3, 1]
    assert [found[name]["ratio"] for name in "abc"] == pytest.approx([10, 10, 1])


@pytest.mark.sampled(0)
def test_fresh_process_measures_memory_and_compile_time() -> None:
    case = Case("core", "forward", "causal", B=1, T=2048)
    scores = 4 * 8 * 2048**2
    found = fresh.weigh("jax-xla", case)
    assert scores <= found["bytes"] <= 6 * scores
    assert 0 < found["compile"] < 60
    assert fresh.weigh("ours-blockwise", case)["bytes"] < scores / 2


@pytest.mark.sampled(0.06)
def test_steps_read_the_tokens_that_the_cache_holds() -> None:
    """Every call writes the same slot after the same tokens."""
    case = Case("step", "forward", "causal", B=2, T=64, N=2, D=8)
    for name, tokens in {"ours": 2, "linen": 2, "ours-int8": 2, "ours-prompt": 2 * 32}.items():
        work = contestants.build(name, case)
        np.testing.assert_array_equal(np.asarray(work.call()), work.call())
        assert work.tokens == tokens
