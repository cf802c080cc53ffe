"""Real processes that lose each other, or differ, end with a clear line."""

import signal
import time
from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict

from experiments.runs import hosts
from experiments.runs.failures import RunError
from tests.experiments.launch import PATIENCE, ROOT, free_address, settings, started, together
from tests.experiments.test_distributed import alone, assert_saved

HEARTBEAT = 10


@pytest.mark.sampled(0, slow=0.3)
def test_damage_seen_by_one_process_ends_all(
    config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters divided by fsdp are saved, with the least threads; then damaged."""
    config.mesh.data, config.mesh.fsdp = 1, 4
    run, heartbeat = tmp_path / "run", f"--heartbeat_timeout={HEARTBEAT}"
    with monkeypatch.context() as patch:
        patch.setenv("NPROC", "1")
        with together(2, tmp_path / "1", *settings(config), f"--workdir={run}") as processes:
            assert processes.wait() == [0, 0], processes.said(0) + processes.said(1)
    assert_saved(run)
    (path,) = (run / "checkpoints/6/state/d").iterdir()
    content = bytearray(path.read_bytes())
    content[4000:4016] = bytes(16)  # In an array's chunk, which another process may not read.
    path.write_bytes(content)
    with together(2, tmp_path / "2", f"--workdir={run}", heartbeat) as processes:
        assert 0 not in processes.wait(), processes.said(0) + processes.said(1)
        said = processes.said(0) + processes.said(1)
    assert "the checkpoint of step 6 is damaged" in said
    assert "start the command once on one process" in said
    config.mesh.fsdp = 1
    assert alone(config, run).start < 6
    assert (run / "checkpoints.damaged" / "6").is_dir()


@pytest.mark.slow
def test_killed_process_ends_the_others(config: ConfigDict, tmp_path: Path) -> None:
    config.steps, config.mesh.data = 100_000, -1
    config.evaluate_every = config.checkpoint_every = 100_000
    with together(
        2, tmp_path / "logs", *settings(config), f"--workdir={tmp_path / 'run'}",
        f"--heartbeat_timeout={HEARTBEAT}",
    ) as processes:  # fmt: skip
        log = tmp_path / "run" / "metrics.jsonl"
        processes.until(lambda: log.exists() and log.stat().st_size > 0)
        processes.all[1].kill()
        start = time.monotonic()
        assert processes.wait()[0] != 0
        assert time.monotonic() - start < HEARTBEAT + 30
        assert "another" in processes.said(0)
        assert "Thread 0x" not in processes.said(0)


@pytest.mark.sampled(0, slow=0.3)
@pytest.mark.parametrize("stopped", [0, 1])
def test_stopped_process_is_reported_as_lost(
    stopped: int, config: ConfigDict, tmp_path: Path
) -> None:
    config.steps, config.mesh.data = 100_000, -1
    config.evaluate_every = config.checkpoint_every = 100_000
    with together(
        2, tmp_path / "logs", *settings(config), f"--workdir={tmp_path / 'run'}",
        f"--heartbeat_timeout={HEARTBEAT}",
    ) as processes:  # fmt: skip
        log = tmp_path / "run" / "metrics.jsonl"
        processes.until(lambda: log.exists() and log.stat().st_size > 0)
        processes.all[stopped].send_signal(signal.SIGSTOP)
        assert processes.all[1 - stopped].wait(PATIENCE) == 1
        last = processes.said(1 - stopped).splitlines()[-1]
        assert last.startswith("error: ")
        assert "start all with the same --workdir" in last


def test_processes_with_different_packages_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    own = f'"the version of jax": "{jax.__version__}"'
    monkeypatch.setattr(hosts, "_gather", lambda x: [x, x.replace(own, own[:-1] + '.dev1"')])
    with pytest.raises(RunError, match=r"the version of jax is .* at process 0 and .*dev1' at"):
        hosts.agree({"config": {"steps": 7}})
    monkeypatch.setattr(hosts, "_gather", lambda x: [x, x])
    hosts.agree({"config": {"steps": 7}})


@pytest.mark.slow
def test_processes_with_different_settings_refuse(config: ConfigDict, tmp_path: Path) -> None:
    config.mesh.data = -1
    with together(
        2, tmp_path / "logs", *settings(config), f"--workdir={tmp_path / 'run'}",
        each=lambda i: [f"--config.optimizer.b1=0.{8 + i}"],
    ) as processes:  # fmt: skip
        assert processes.wait() == [1, 1]
        for i in range(2):
            assert "config.optimizer.b1 is 0.8 at process 0 and 0.9 at" in processes.said(i)
            assert "Traceback" not in processes.said(i)
    assert not (tmp_path / "run").exists()


THERE = """
import os, runpy, sys
sys.path[0] = os.getcwd()
os.chdir(sys.argv.pop(1))
os.environ |= {"JAX_ENABLE_X64": os.path.basename(os.getcwd())} if "x64" in os.getcwd() else {}
from experiments.runs import failures
failures.install()
runpy.run_module("experiments.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("data", "the SHA-256 of the data is"),
        ("x64", "jax_enable_x64 is False at process 0 and True at process 1"),
    ],
)
def test_processes_with_different_data_or_environments_refuse(
    kind: str, told: str, tmp_path: Path
) -> None:
    """A relative path may lead to other files."""
    address = free_address()
    sizes = {"length": 16, "data.stride": 8, "model.features": 16, "model.mlp_dim": 16}
    commands = []
    for i in range(2):
        there = tmp_path / kind / str(i)
        there.mkdir(parents=True)
        (there / "text").write_text(f"a text of process {i if kind == 'data' else 0} " * 100)
        commands.append([
            "-c", THERE, str(there), "--distributed", f"--coordinator_address={address}",
            "--num_processes=2", f"--process_id={i}", "--config.data.path=text",
            f"--config={ROOT / 'configs' / 'pydoc_lm.py'}", f"--workdir={tmp_path / 'run'}",
            *(f"--config.{key}={value}" for key, value in sizes.items()),
        ])  # fmt: skip
    with started(commands, tmp_path / "logs") as processes:
        assert processes.wait() == [1, 1], processes.said(0) + processes.said(1)
        for i in range(2):
            assert told in processes.said(i).splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_process_without_peers_reports_it(tmp_path: Path) -> None:
    with together(
        1, tmp_path / "logs", f"--workdir={tmp_path / 'run'}", "--start_timeout=2",
        each=lambda i: ["--num_processes=2", "--process_id=1"],
    ) as processes:  # fmt: skip
        assert processes.wait() == [1]
        assert "no run of 2 processes came together at 127.0.0.1:" in processes.said(0)
        assert "within 2 s" in processes.said(0)
