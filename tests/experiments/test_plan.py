"""The planner: facts read from compiled programs, and estimates from them."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from configs import decoder_1b, long_encoder, masked
from experiments import tasks
from experiments.common.counts import hlo, work
from experiments.common.counts.chips import CHIPS
from experiments.common.counts.chips import GPUS as GPU_TABLE
from experiments.common.devices import mesh_sizes
from experiments.common.failures import RunError
from experiments.plan import collectives, compiled, devices, report, roofline, search
from experiments.plan.collectives import Collective
from experiments.plan.roofline import Machines, Torus
from tests.support.meshes import total


def test_loop_bodies_count_once_per_iteration(optimized: None) -> None:
    """Operations and collectives of nested scans, against the formula."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = jnp.ones((3, 16, 16)), jnp.ones((8, 4, 16))

    def layer(x, w):
        def inner(x, _):
            return jax.lax.psum(x @ w, "x") / 8, None

        return jax.lax.scan(inner, x, None, length=5)[0], None

    def whole(w, x):
        return jax.lax.scan(layer, x, w)[0]

    specs = {"in_specs": (P(), P("x")), "out_specs": P("x"), "check_vma": False}
    over = jax.shard_map(whole, mesh=mesh, **specs)
    text, _ = compiled.dumped(jax.jit(over).lower(w, x))
    module = hlo.Module(text)
    assert work.flops(module) == 3 * 5 * 2 * 4 * 16 * 16
    assert total(collectives.read(module, 8)) == {"all-reduce": (15, 15 * 4 * 4 * 16)}
    assert not module.unknown


# The TPU compiler's form of a product that overlaps its gather, two steps in one run of the body.
STEPS_OF_TWO = """
%body (p: (f32[4], s32[])) -> (f32[4], s32[]) {
  %p = (f32[4]{0}, s32[]) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=0
  %i = s32[] get-tuple-element(%p), index=1
  %two = s32[] constant(2)
  %sent = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  %next = s32[] add(%i, %two)
  ROOT %t = (f32[4]{0}, s32[]) tuple(%sent, %next)
}

%condition (p.1: (f32[4], s32[])) -> pred[] {
  %p.1 = (f32[4]{0}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%p.1), index=1
  %seven = s32[] constant(7)
  ROOT %less = pred[] compare(%j, %seven), direction=LT
}

ENTRY %main (p.2: f32[4]) -> (f32[4], s32[]) {
  %p.2 = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %first = (f32[4]{0}, s32[]) tuple(%p.2, %zero)
  ROOT %loop = (f32[4]{0}, s32[]) while(%first), condition=%condition, body=%body
}
"""


def test_counters_of_loops_may_count_by_two() -> None:
    assert total(collectives.read(STEPS_OF_TWO, 2)) == {"collective-permute": (4, 4 * 4 * 4)}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu")
def test_sums_by_sparse_cores_are_read() -> None:
    """A tpu7x sums over devices in a computation that a custom call names."""
    mesh = jax.sharding.Mesh(np.array(devices.of("tpu7x:2x2x1")), "x")
    over = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    x = jax.ShapeDtypeStruct((mesh.size, 512, 1024), jnp.float32)
    text, _ = compiled.dumped(jax.jit(over).lower(x))
    assert "sparsecore" in text
    assert total(collectives.read(text, mesh.size)) == {"all-reduce": (1, 4 * 512 * 1024)}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [[3, 1], [2, 0]]),
        ("replica_groups=mesh['a'=1,'b'=4] {'a','b':(1)2}", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,1},{1,2}}", [[0, 1], [1, 2]]),
    ],
)
def test_replica_groups_are_read_in_all_forms(text: str, groups: list[list[int]]) -> None:
    text_of_it = "\n".join([
        "ENTRY %e (p: f32[6]) -> f32[6] {", "  %p = f32[6]{0} parameter(0)",
        f"  ROOT %r = f32[6]{{0}} all-gather(%p), {text}, dimensions={{0}}", "}",
    ])  # fmt: skip
    (found,) = collectives.read(text_of_it, 4)
    assert found.groups.tolist() == groups
    with pytest.raises(ValueError, match="can't read the groups"):
        collectives.read(text_of_it.replace(text, "replica_groups=new"), 4)


# The TPU compiler's form of a gather that overlaps a matmul, and of a reduction that leaves each
# device a part.
OVERLAPPED = """
%async_collective_fusion.1 (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  ROOT %all-gather.2 = f32[8]{0} all-gather(%p), channel_id=1, replica_groups=[1,2]<=[2]
}

%begin (p.1: f32[4]) -> (f32[4], f32[8]) {
  %p.1 = f32[4]{0} parameter(0)
  %all-gather.1 = f32[8]{0} all-gather(%p.1), channel_id=1, replica_groups=[1,2]<=[2]
  ROOT %c = (f32[4], f32[8]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%end (p.2: f32[4]) -> f32[8] {
  %p.2 = f32[4]{0} parameter(0)
  %all-gather.3 = f32[8]{0} all-gather(%p.2), channel_id=1, replica_groups=[1,2]<=[2]
  ROOT %d = f32[8]{0} custom-call(%all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (p.3: f32[8]) -> f32[4] {
  %p.3 = f32[8]{0} parameter(0)
  %all-reduce.1 = f32[8]{0} all-reduce(%p.3), channel_id=2, replica_groups={{0,1}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %s = f32[4]{0} dynamic-slice(%all-reduce.1, %zero), dynamic_slice_sizes={4}
}

ENTRY %main (p.4: f32[4]) -> f32[4] {
  %p.4 = f32[4]{0} parameter(0)
  %f.1 = (f32[4]{0}, f32[8]{0}) fusion(%p.4), kind=kCustom, calls=%begin
  %f.2 = f32[8]{0} fusion(%p.4), kind=kCustom, calls=%async_collective_fusion.1
  %f.3 = f32[8]{0:T(8,128)S(1)} fusion(%p.4), kind=kCustom, calls=%end
  %g = ((f32[4]{0}), f32[8]{0}, u32[]) all-gather-start(%p.4), replica_groups=[1,2]<=[2]
  %h = f32[8]{0} all-gather-done(%g)
  ROOT %f.4 = f32[4]{0} fusion(%f.3), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_collective_in_parts_counts_once() -> None:
    found = collectives.read(OVERLAPPED, 2)
    assert [(one.kind, one.bytes) for one in found] == [
        ("all-gather", 32), ("all-gather", 32), ("reduce-scatter", 16),
    ]  # fmt: skip
    assert [one.sent for one in found] == [16, 16, 16]


CHIP = CHIPS["TPU v5 lite"]
PLACES = np.stack(np.meshgrid(np.arange(16), np.arange(16), indexing="ij"), -1).reshape(-1, 2)
POD = Torus(CHIP, 1, PLACES, (16, 16))
HALF = Torus(CHIP, 1, PLACES[:128], (8, 16))
ROW = np.arange(256).reshape(16, 16)  # groups along the second axis


@pytest.mark.parametrize(
    ("torus", "kind", "groups", "expected"),
    [
        # A ring has two links into a chip, a line has one, and two axes have twice as many.
        (POD, "all-gather", ROW, 15 / 16 / 2),
        (HALF, "all-gather", np.arange(128).reshape(8, 16).T, 7 / 8),
        (POD, "all-gather", ROW.reshape(1, 256), 255 / 256 / 4),
        # Every second chip: two groups share the links.
        (POD, "all-gather", ROW[:, ::2], 2 * 7 / 8 / 2),
        # Half a ring is a line.
        (POD, "reduce-scatter", ROW[:, :8], 7.0),
        # Three chips on, and across the end of the ring.
        (POD, "collective-permute", np.array([[0, 3], [1, 2]]), 3.0),
        (POD, "collective-permute", np.array([[15, 0]]), 1.0),
        (POD, "all-to-all", ROW, 16 / 4 / 2),
    ],
)
def test_time_of_tpu_collective_follows_its_links(
    torus: Torus, kind: str, groups: np.ndarray, expected: float
) -> None:
    one = Collective(kind, 1000, 1, groups)
    assert torus.seconds(one) * CHIP.link / 1000 == pytest.approx(expected)


GPUS = GPU_TABLE["NVIDIA H200"]
TWO = Machines(GPUS, np.repeat([0, 1], 8))
ALL = np.arange(16)[None]


@pytest.mark.parametrize(
    ("kind", "groups", "expected"),
    [
        # Within the machines, which takes longer than an eighth takes to cross the network.
        ("all-reduce", ALL, 2 * 15 / 16 / GPUS.link),
        ("all-reduce", ALL[:, ::4], 2 * 1 / 2 / 2 / GPUS.network),
        ("all-to-all", ALL, 1 / 2 / GPUS.network),
        ("collective-permute", np.array([[0, 1], [7, 8]]), 1 / GPUS.network),
    ],
)
def test_time_of_gpu_collective_follows_its_links(
    kind: str, groups: np.ndarray, expected: float
) -> None:
    assert TWO.seconds(Collective(kind, 1000, 1, groups)) == pytest.approx(1000 * expected)


@pytest.mark.slow
def test_plan_accounts_for_all_device_memory(
    config: ConfigDict, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes by kind add up to the program's total, and tables have them."""
    layouts = search.search(config, jax.devices(), 1)
    (done,) = [layout for layout in layouts if layout.found]
    assert len(layouts) == len(search.splits(8)) == 20
    memory, rows = done.found.memory, config.batch_size // done.sizes["data"] // done.sizes["fsdp"]
    # Beside the state: images of 8×8 and labels, four bytes each; the step and a random key. The
    # flag for a finite last step is only written, so its byte is no argument.
    assert memory.batch == 4 * rows * 65 + 4 + 8 - 1
    params = jax.eval_shape(tasks.make(config).init, jax.random.key(0))
    state = sum(12 * x.size for x in jax.tree.leaves(params))  # with two moments, in float32
    shards = done.sizes["fsdp"] * done.sizes["model"]
    assert state / shards <= memory.parameters + memory.optimizer <= state + 100
    assert memory.peak >= memory.parameters + memory.optimizer + memory.activations
    reasons = {layout.reason.split(":")[0].split(" ")[0] for layout in layouts}
    assert reasons == {"", "left"}
    assert done.found.flops > 0
    assert report.memory([done]).splitlines()[2].startswith(f"| {done} | ")
    assert "| all-reduce | – | " in report.sent(done)
    report.show(layouts)
    assert "not compiled: 19 × left out; raise --most\n" in capsys.readouterr().out


@pytest.mark.slow
def test_masked_task_predicts_only_hidden_bytes() -> None:
    """Visible bytes have no loss, and hidden bytes leave no trace in the predictions."""
    config = masked.get_config()
    config.length, config.batch_size, config.model.num_layers = 32, 4, 1
    task = tasks.make(config)
    params = jax.jit(task.init)(jax.random.key(0))
    evaluate = jax.jit(task.evaluate)
    apply = jax.jit(functools.partial(task.model.apply, deterministic=True))
    (test,) = task.test_batches()
    test = {name: x[:4] for name, x in test.items()}
    before = evaluate(params, test)
    assert int(before["count"]) == test["hidden"].sum()
    changed = np.where(test["hidden"], test["bytes"] ^ 1, test["bytes"])
    x, y = (
        apply({"params": params}, jnp.where(test["hidden"], 255, b.astype(int)))
        for b in (test["bytes"], changed)
    )
    np.testing.assert_array_equal(x, y)
    nothing = {**test, "hidden": np.zeros_like(test["hidden"])}
    assert evaluate(params, nothing)["loss"] == 0.0


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e", "a generation of TPUs and its sizes, such as v5e:16x16.*got 'v5e'"),
        ("cpu:9", "at most the 8 available"),
        ("h200:12", "1 to 8 GPUs, or a multiple of 8; try 16"),
        ("2xcpu:4", "slices: 2xv5e:16x16"),
        ("100xv5e:16x16", "at most 16,384 devices"),
        ("v5e:0x0", "such as v5e:16x16.*got 'v5e:0x0'"),
        ("v5e:" + "9" * 5000, "such as v5e:16x16"),
        ("v5e:3x3", "libtpu"),  # refuses it, or is not installed
    ],
)
def test_invalid_topologies_raise(topology: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        devices.of(topology)


@pytest.mark.parametrize(
    ("config", "size"),
    [(decoder_1b.get_config(), 973_670_400), (long_encoder.get_config(), 8 * 12 * 8192**2)],
    ids=["decoder_1b", "long_encoder"],
)
def test_configs_have_their_stated_sizes(config: ConfigDict, size: int) -> None:
    with jax.numpy_dtype_promotion("standard"):  # as for users: Flax's norms need it
        params = jax.eval_shape(tasks.make(config).init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == pytest.approx(size, rel=1e-3)


@pytest.fixture
def decoder() -> ConfigDict:
    """Return the decoder's config, small, for 8 devices."""
    config = decoder_1b.get_config()
    config.model.update(features=256, num_layers=2, num_heads=2, num_kv_heads=2, mlp_dim=512)
    config.length = config.data.stride = 256
    config.batch_size, config.mesh.fsdp = 8, 1
    return config


SLICES = Torus(CHIP, 1, np.tile(PLACES, (2, 1)), (16, 16), 2)


@pytest.mark.parametrize(
    ("kind", "target", "groups", "seconds"),
    [
        ("ALL_REDUCE", '"{1,2}x{0:1}"', [[0, 256], [1, 257]], 1000),
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
