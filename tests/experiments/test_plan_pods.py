"""The planner on pods: links between slices and machines, deep models, and remedies."""

import importlib.util

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import decoder_1b
from experiments.counts.chips import CHIPS, GPUS
from experiments.plan import collectives, compiled, depth, devices, remedies, report, search
from experiments.plan.collectives import Collective
from experiments.plan.gpus import Machines
from experiments.plan.roofline import Torus
from experiments.runs.failures import RunError
from experiments.trainer import mesh

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
    assert mesh.mesh_sizes(config, 16, 2) == (8, 1, 1, 1)
    config.mesh.data = 16
    with pytest.raises(RunError, match="times 2 slices, got 16; try 32"):
        mesh.mesh_sizes(config, 16, 2)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_two_slices_send_gradients_over_network(decoder: ConfigDict) -> None:
    """Each chip sends the gradient of its own parameters, in bfloat16, to the other slice."""
    decoder.mesh.update(fsdp=2, model=2)
    found = devices.of("2xv5e:2x2")
    with jax.numpy_dtype_promotion("standard"):
        layout = search.plan(decoder, found)
    assert layout.sizes == {"dcn": 2, "data": 1, "fsdp": 2, "model": 2, "context": 1}
    sent = report.by_link(layout)
    assert 0.5 <= sent["DCN"][0] / layout.found.memory.parameters <= 1.0
    assert sent["DCN"][1] == pytest.approx(sent["DCN"][0] / CHIP.network)
    assert layout.times.network == pytest.approx(sent["DCN"][1] + sent["ICI"][1])
    assert "DCN" in report.link_line(layout)


def test_collectives_of_layers_grow_linearly() -> None:
    """Also where XLA joined those of several layers into one."""
    low = [Collective("all-reduce", 10, 2, ALL), Collective("all-gather", 8, 1, ALL)]
    high = [Collective("all-reduce", 40, 1, ALL), Collective("all-gather", 8, 1, ALL)]
    high.append(Collective("all-gather", 6, 2, ALL[:, :8]))
    found = depth._extend_sent(low, high, 20)
    assert sum(one.times * one.bytes for one in found if one.kind == "all-reduce") == 20 + 4 * 20
    others = [(one.times, one.bytes) for one in found if one.kind == "all-gather"]
    assert others == [(1, 8), (8, 6)]


@pytest.mark.sampled(0, slow=0.3)
def test_extrapolated_layers_cost_as_compiled_ones(decoder: ConfigDict) -> None:
    """A model of 18 layers from 4 and 8: parameters, operations and bytes sent are exact, and
    memory differs by less than 5%.
    """
    decoder.model.update(num_layers=18, scan=False)
    decoder.mesh.update(data=2, fsdp=2, model=2)
    with jax.numpy_dtype_promotion("standard"):
        shallow, whole = (depth.step(decoder, jax.devices(), whole) for whole in (False, True))
    assert (shallow.depths, whole.depths) == (depth.DEPTHS, ())
    assert shallow.flops == whole.flops
    assert shallow.memory[:2] == whole.memory[:2]
    sent = [sum(one.times * one.sent for one in x.sent) for x in (shallow, whole)]
    assert sent[0] == pytest.approx(sent[1], rel=0.001)
    assert shallow.moved == pytest.approx(whole.moved, rel=0.01)
    assert shallow.memory.peak == pytest.approx(whole.memory.peak, rel=0.05)


def test_too_large_depth_extrapolates_its_needs(
    decoder: ConfigDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(config, devices):
        raise compiled.TooLargeError(100 + 10 * config.model.num_layers, 50)

    monkeypatch.setattr(compiled, "step", step)
    decoder.model.update(num_layers=32, scan=False)
    with pytest.raises(compiled.TooLargeError) as caught:
        depth.step(decoder, jax.devices())
    assert (caught.value.needs, caught.value.has) == (100 + 320, 50)


@pytest.mark.slow
def test_remedies_come_in_order_of_cost(
    decoder: ConfigDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimates far above the memory are not compiled, and the search ends at one that fits."""
    tried = []

    def plan(config, devices, whole=False):
        tried.append((config.mesh.fsdp, config.model.remat, config.mesh.context, config.batch_size))
        needs = 2e6 + 2.5e5 * config.batch_size
        reason = "does not fit" if needs > 9e6 else ""
        return search.Layout({}, reason=reason, needs=needs, has=9e6)

    monkeypatch.setattr(search, "plan", plan)
    decoder.model.remat, decoder.batch_size = False, 32
    sizes = {"data": 8, "fsdp": 1, "model": 1, "context": 1}
    tight = search.Layout(sizes, reason="does not fit", needs=4e7, has=9e6)
    with jax.numpy_dtype_promotion("standard"):  # as for users: Flax's norms need it
        found = remedies.find(decoder, jax.devices(), tight)
    needs = [one.needs for one in found]
    assert needs == sorted(needs, reverse=True)
    assert [one.name.split()[0] for one in found][:2] == ["shard", "store"]
    assert found[0].layout is None  # estimated
    assert found[0].needs < 4e7
    assert not found[-1].layout.reason
    assert tried == [(8, True, 1, 32), (4, True, 2, 16)]
    assert "--config.mesh.fsdp=4 --config.model.remat=True" in found[-1].flags
    assert "--config.batch_size=16 --config.optimizer.accumulate=2" in found[-1].flags
    assert report.remedies(found, tight).count("\n") == len(found) + 1
