"""The planner on pods: links between slices and machines, and remedies."""

import importlib.util

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import decoder_1b
from experiments.counts.chips import CHIPS, GPUS
from experiments.devices import mesh_sizes
from experiments.plan import collectives, devices, report, roofline, search
from experiments.plan.collectives import Collective
from experiments.plan.roofline import Machines, Torus
from experiments.runs.failures import RunError

TWO = Machines(GPUS["NVIDIA H200"], np.repeat([0, 1], 8))
ALL = np.arange(16)[None]
CHIP = CHIPS["TPU v5 lite"]
PLACES = np.stack(np.meshgrid(np.arange(16), np.arange(16), indexing="ij"), -1).reshape(-1, 2)
POD = Torus(CHIP, 1, PLACES, (16, 16))


@pytest.fixture
def decoder() -> ConfigDict:
    """Return the decoder's config, small, for 8 devices."""
    config = decoder_1b.get_config()
    config.model.update(features=256, num_layers=2, num_heads=2, num_kv_heads=2, mlp_dim=512)
    config.length = config.data.stride = 256
    config.batch_size, config.mesh.fsdp = 8, 1
    return config


@pytest.mark.parametrize(
    ("kind", "groups", "links"),
    [
        ("all-reduce", ALL[:, :8], {"NVLink": 2 * 7 / 8}),
        ("all-reduce", ALL[:, ::8], {"InfiniBand": 1}),
        ("all-gather", ALL, {"NVLink": 15 / 16, "InfiniBand": 1 / 2 / 8}),
        ("collective-permute", np.array([[7, 8], [15, 0]]), {"InfiniBand": 1}),
    ],
)
def test_gpu_bytes_go_over_nvlink_or_infiniband(
    kind: str, groups: np.ndarray, links: dict[str, float]
) -> None:
    found = TWO.by_link(Collective(kind, 1000, 1, groups))
    assert found == pytest.approx({link: 1000 * share for link, share in links.items()})


SLICES = Torus(CHIP, 1, np.tile(PLACES, (2, 1)), (16, 16), 2)


@pytest.mark.parametrize(
    ("kind", "target", "groups", "seconds"),
    [
        ("ALL_REDUCE", '"{1,2}x{0:1}"', [[0, 256], [1, 257]], 1000),
        ("ALL_GATHER", '"{1,2}x{0:1}"', [[0, 256], [1, 257]], 500),
        ("ALL_TO_ALL", "{{100000,200000},{100003,200003}}", [[0, 256], [3, 259]], 500),
        ("ONE_TO_ONE", "{{100000->200000},{200000->100000}}", [[0, 256], [256, 0]], 1000),
    ],
)
def test_transfers_between_slices_are_read(
    kind: str, target: str, groups: list[list[int]], seconds: float
) -> None:
    """They take the network of the data center, and a collective within a slice does not."""
    text = "\n".join([
        "ENTRY %e (p: f32[250]) -> f32[250] {", "  %p = f32[250]{0} parameter(0)",
        "  %a = token[] after-all()",
        f"  %r = (f32[250]{{0}}, u32[], token[]) recv(%a), channel_id=1, frontend_attributes="
        f'{{_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}',
        "  ROOT %g = f32[250]{0} all-gather(%p), replica_groups={}, dimensions={0}", "}",
    ])  # fmt: skip
    between, within = collectives.read(text, 512, 2)
    assert between.groups.tolist() == groups
    assert SLICES.by_link(between) == {"DCN": seconds}
    assert SLICES.seconds(between) == pytest.approx(seconds / CHIP.network)
    assert within.groups.tolist() == [[*range(256)]]
    assert [*SLICES.by_link(within)] == ["ICI"]
    assert SLICES.seconds(within) == pytest.approx(POD.seconds(within))
    with pytest.raises(ValueError, match="can't read the slices"):
        collectives.read(text.replace(target, "new"), 512, 2)


def test_batch_divides_over_slices(config: ConfigDict) -> None:
    config.mesh.data, config.batch_size = -1, 16
    assert mesh_sizes(config, 16, 2) == (8, 1, 1, 1)
    config.mesh.data = 16
    with pytest.raises(RunError, match="times 2 slices, got 16; try 32"):
        mesh_sizes(config, 16, 2)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_two_slices_send_gradients_over_network(decoder: ConfigDict) -> None:
    """Each chip sends the gradient of its own parameters, in bfloat16, to the other slice."""
    decoder.mesh.update(fsdp=2, model=2)
    found = devices.of("2xv5e:2x2")
    with jax.numpy_dtype_promotion("standard"):
        layout = search.plan(decoder, found)
    assert layout.sizes == {"dcn": 2, "data": 1, "fsdp": 2, "model": 2, "context": 1}
    links = roofline.network(found)
    sums = dict.fromkeys(("DCN", "ICI"), np.zeros(2))
    for one in layout.found.sent:
        ((link, size),) = links.by_link(one).items()
        sums[link] = sums[link] + one.times * np.array([size, links.seconds(one)])
    size, seconds = sums["DCN"]
    assert 0.5 <= size / layout.found.memory.parameters <= 1.0
    assert seconds == pytest.approx(size / CHIP.network)
    assert layout.times.network == pytest.approx(seconds + sums["ICI"][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has", "tried"),
    [
        (9e6, [(8, False, 1, 32), (8, search.POLICIES[0], 1, 32)]),
        (3.6e6, [(4, True, 2, 16), (4, True, 2, 8)]),
        (1e6, [(4, True, 2, 16), (4, True, 2, 8), (4, True, 2, 4)]),
    ],
)
def test_remedies_come_in_order_of_cost(
    decoder: ConfigDict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    has: float, tried: list[tuple[int, bool, int, int]],
) -> None:  # fmt: skip
    """They end at a layout that fits, or where fewer rows bring nothing."""
    found = []

    def plan(config, devices):
        mesh, rows, remat = config.mesh, config.batch_size, config.model.remat
        found.append((mesh.fsdp, remat, mesh.context, rows))
        needs = 3e6 + 1e6 * (max(rows, 8) / 16 if remat is True else rows / (8 if remat else 2))
        return search.Layout({}, reason="does not fit" * (needs > has), needs=needs, has=has)

    monkeypatch.setattr(search, "plan", plan)
    decoder.model.remat, decoder.batch_size = False, 32
    sizes = {"data": 8, "fsdp": 1, "model": 1, "context": 1}
    tight = search.Layout(sizes, reason="does not fit", needs=4e7, has=has)
    layouts = search.remedies(decoder, jax.devices(), tight, lambda layout: None)
    assert found[-len(tried) :] == tried
    assert len(layouts) == len(found)
    report.show([tight, *layouts])
    said = capsys.readouterr().out
    if has == 1e6:
        assert "nothing fits; take more devices" in said
    else:
        assert "fits with --config.mesh.data=1 --config.mesh.fsdp=" in said
        assert f"--config.batch_size={tried[-1][3]}" in said or tried[-1][3] == 32
