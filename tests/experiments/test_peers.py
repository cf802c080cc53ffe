"""Attention next to other libraries: the command, its measurements, and equal results."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.measure import __main__ as measure
from experiments.measure import timing
from experiments.measure.peers import contestants, fresh
from experiments.measure.peers.cases import Case
from experiments.measure.peers.contestants import CONTESTANTS
from experiments.measure.timing import RefusalError, Work
from experiments.runs.failures import RunError
from flax_mha import dot_product_attention
from tests.support.oracle import error

TINY = (
    "peers", "--lengths=16,32", "--heads=2", "--features=16", "--tokens=32", "--seconds=0.02",
    "--dtypes=float32", "--memory=none",
)  # fmt: skip
SMALL = Case("layer", "backward", "causal", B=2, T=12, N=2, D=16)


@pytest.fixture(autouse=True)
def _as_users_run() -> Iterator[None]:
    """Allow implicit promotion, which other libraries rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.sampled(0, slow=0.16)
def test_peers_write_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    names = "--contestants=ours,linen,jax-xla,jax-cudnn,ours-prompt"
    measure.main([*TINY, "--parts=layer,core,step", "--masks=full", names, f"--workdir={folder}"])
    shown = capsys.readouterr()
    assert "timing layer, forward, full, float32, B=2 T=16, 1 of 10 …" in shown.err
    assert (folder / "table.md").read_text().strip() in shown.out

    result = json.loads((folder / "results.json").read_text())
    assert result["machine"]["versions"]["jax"] == jax.__version__
    # Two lengths and passes; the layer has 2 contestants, the core 3, a step has 3 and no passes.
    assert len(result["rows"]) == 4 * (2 + 3) + 2 * 3
    for row in result["rows"]:
        if row["contestant"] == "jax-cudnn":
            assert (row["status"], row["reason"]) == ("refused", "needs an NVIDIA GPU; this is cpu")
            continue
        assert row["status"] == "ok"
        assert 0 < row["q1"] <= row["median"] <= row["q3"]
        assert (row["tokens"] > 0) == (row["part"] == "step")
        base = contestants.BASELINES[row["part"]]
        assert (row["ratio"] == 1) if row["contestant"] == base else row["ratio"] > 0


@functools.lru_cache
def outcome(name: str, case: Case) -> list[np.ndarray]:
    """Return the output, the gradients of the inputs, and the norm of those of parameters."""
    result = jax.tree.leaves(contestants.build(name, case).call(), is_leaf=_is_tensor)
    out, *grads = (x.detach().float().numpy() if _is_tensor(x) else np.float32(x) for x in result)
    # JAX's gradients of inputs come after those of parameters, torch's before.
    inputs = len(case.inputs()) if grads else 0
    split = inputs if name.startswith("torch") else len(grads) - inputs
    first, others = (grads[:split], grads[split:])[:: 1 if name.startswith("torch") else -1]
    norm = np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in others))
    return [out, *first, norm]


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "detach")


@pytest.mark.sampled(0.02)
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
    assert len(found) == 2 + len(case.inputs())
    for one, wanted in zip(found[:-1], expected[:-1], strict=True):
        assert error(one, wanted) < tolerance
    if part == "layer":
        assert found[-1] == pytest.approx(expected[-1], rel=tolerance)
        assert expected[-1] > 0
    if dtype == "float32":
        forward = outcome(name, dataclasses.replace(case, passes="forward"))
        assert error(forward[0], expected[0]) < tolerance


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_window_has_the_near_tokens(mask: str) -> None:
    case = dataclasses.replace(SMALL, part="core", passes="forward", mask=mask, window=5)
    q, k, v = case.inputs()
    distance = np.arange(12)[:, None] - np.arange(12)
    near = (abs(distance) < 5) & ((distance >= 0) | (mask == "full"))
    expected = dot_product_attention(q, k, v, mask=near, kernel="reference")
    assert error(outcome("ours", case)[0], expected) < 1e-5
    with pytest.raises(RefusalError, match="takes no --window"):
        contestants.build("jax-xla", case)


def test_failed_contestants_say_why() -> None:
    def broken() -> Work:
        raise ImportError("no such symbol\nin this version")

    def absent() -> Work:
        import no_such_module  # noqa: F401

        raise AssertionError

    def refusing() -> Work:
        q = jax.numpy.ones((1, 4, 2, 8))
        return Work(lambda: dot_product_attention(q, q, q, kernel="splash"))

    calls = iter([1])
    found = timing.race(
        {
            "broken": broken, "absent": absent, "refusing": refusing,
            "fragile": lambda: Work(lambda: next(calls)),  # fails in its second call
        },
        1, 1.0,
    )  # fmt: skip
    assert {name: (row["status"], row["reason"]) for name, row in found.items()} == {
        "broken": ("failed", "ImportError: no such symbol"),
        "absent": ("refused", "no_such_module is not installed"),
        "refusing": ("refused", "runs on TPU only, this is cpu"),
        "fragile": ("failed", "StopIteration"),
    }
    assert timing.cells(found["fragile"]) == ["failed: StopIteration", "", ""]


def test_case_beyond_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.machine, "free_bytes", lambda: 24 * 2**30)
    with pytest.raises(RefusalError, match=r"needs about 64 GiB, 24 are free"):
        contestants.build("linen", Case("layer", "backward", "causal", B=1, T=16384))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths=12,x"], "--lengths: must be a whole number from 1, got 'x'"),
        (["--heads=3"], "--features must be a multiple of --heads, got 512 and 3; choose another"),
        (["--parts=core", "--contestants=keras"], "--contestants must name one that takes part"),
    ],
)
def test_bad_flags_give_clear_errors(words: list[str], message: str) -> None:
    with pytest.raises(RunError, match=message):
        measure.main(["peers", *words])


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Work]:
    """Return a function that builds works which only move the clock."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def build(seconds: float, log: Callable[[], Any]) -> Work:
        return Work(lambda: (log(), now.append(now.pop() + seconds)))

    return build


def test_contestants_take_turns(sleeping: Callable[..., Work]) -> None:
    log: list[str] = []
    seconds = {"a": 0.03, "b": 0.03, "c": 0.3}
    builds = {name: functools.partial(sleeping, t, functools.partial(log.append, name))
              for name, t in seconds.items()}  # fmt: skip
    found = timing.race(builds, rounds=3, seconds=0.9, baseline="c")
    # Two calls each to compile and to estimate the time. Then each leads a round, but a call of c
    # takes its share of 0.3 seconds.
    assert "".join(log) == "aabbcc" + "abc" + "ba" + "ab"
    assert [found[name]["rounds"] for name in "abc"] == [3, 3, 1]
    assert [found[name]["ratio"] for name in "abc"] == pytest.approx([10, 10, 1])
    assert [found["a"][name] for name in ("q1", "median", "q3")] == pytest.approx([0.03] * 3)


@pytest.mark.sampled(0, slow=0.16)
def test_fresh_process_measures_memory_and_compile_time() -> None:
    case = Case("core", "forward", "causal", B=1, T=2048)
    scores = 4 * 8 * 2048**2
    found = fresh.weigh("jax-xla", case)
    assert scores <= found["bytes"] <= 6 * scores
    assert 0 < found["compile"] < 60
    assert fresh.weigh("ours-blockwise", case)["bytes"] < scores / 2
    assert fresh.weigh("jax-cudnn", case)["reason"] == "needs an NVIDIA GPU; this is cpu"


@pytest.mark.sampled(0.3)
def test_steps_read_the_tokens_that_the_cache_holds() -> None:
    """Every call writes the same slot after the same tokens."""
    case = Case("step", "forward", "causal", B=2, T=64, N=2, D=8)
    group = CONTESTANTS["step"]
    for name in ("ours", "linen", "ours-int8"):
        work = group[name](case)
        first = np.asarray(work.call())
        np.testing.assert_array_equal(work.call(), first)
    assert group["ours-nearly-empty"](case).tokens == 2
    assert group["ours-prompt"](case).tokens == 2 * 32
