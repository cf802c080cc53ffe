"""How fast a run is, in words."""

import pytest
from ml_collections import ConfigDict

from experiments import data
from experiments.plan import compiled
from experiments.training import loop, progress


@pytest.mark.slow
def test_speed_counts_the_operations_of_the_compiled_step(
    config: ConfigDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "peak", lambda program: 1e9)
    built = loop.build(config, data.make(config))
    with built.on_mesh():
        state = built.create(built.seeds)
        speed = progress.Speed(built, state, built.put(next(built.batches())))
    flops = compiled.step(config, list(built.mesh.devices.flat)).flops
    assert flops > 1e6
    share = f"MFU {flops * 40 / 1e9:.1%}"
    assert speed.text(40.0, 4000) == f", 640 examples/s, {share}, 1 min 40 s left"
    assert speed.text(40.0, 0) == f", 640 examples/s, {share}"
    assert speed.text(0.0, 9) == ""


def test_without_a_known_chip_there_is_no_share(config: ConfigDict) -> None:
    built = loop.build(config, data.make(config))
    assert progress.peak(built) == 0
    assert progress.Speed(built, None, None).text(2.0, 1) == ", 32 examples/s, 0 s left"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (9e4, "25 h 0 min")]
)
def test_seconds_as_people_say_them(seconds: float, said: str) -> None:
    assert progress.duration(seconds) == said
