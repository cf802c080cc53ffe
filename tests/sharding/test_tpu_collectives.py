"""Collectives of a layer on a TPU pod, counted by the TPU compiler without a TPU.

The numbers follow the formula in docs/sharding.md.
"""

import importlib.util
import math
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.common.counts import work
from experiments.common.counts.hlo import Module
from experiments.plan import compiled
from experiments.plan.collectives import read
from flax_mha import (
    EncoderBlock,
    Experts,
    MultiHeadAttention,
    QKNorm,
    dot_product_attention,
    masks,
    sharding,
)
from flax_mha.models.embeddings import TokenEmbedding
from flax_mha.models.feed_forward import MLP
from flax_mha.positions import Rotary
from flax_mha.sharding import products
from flax_mha.variants import (
    ChosenBlocksAttention,
    DifferentialAttention,
    ForgettingAttention,
    MultiHeadLatentAttention,
    TalkingHeadsAttention,
)
from tests.sharding.test_sharded_models import FSDP, ROWS
from tests.support import lowered_layers
from tests.support.meshes import KINDS, changed, described, total

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu"),
]
N, H, T, D, LOCAL = 16, 64, 512, 256, 2  # rows per device


def pod(topology: str, axes: tuple[str, str], size: int, kind: str = "Explicit") -> Mesh:
    """Return a mesh of absent TPUs. `size` is that of the last axis."""
    chips = np.array(topologies.get_topology_desc(topology, "tpu").devices)
    return Mesh(chips.reshape(-1, size), axes, axis_types=(KINDS[kind],) * 2)


@pytest.mark.parametrize(
    ("kernel", "topology", "kind"),
    [
        ("auto", "v5e:4x4", "Auto"), ("auto", "v5p:4x4x4", "Explicit"),
        ("auto", "v6e:16x16", "Auto"), ("flex", "v5e:4x4", "Explicit"),
        ("blockwise", "v5e:4x4", "Explicit"),
    ],
)  # fmt: skip
def test_layer_sends_the_bytes_of_the_formula(
    optimized: None, kernel: str, topology: str, kind: str
) -> None:
    """Heads over 16 devices, rows over the other axis."""
    layer = MultiHeadAttention(N, head_dim=H, mask=masks.Causal(), kernel=kernel)
    mesh = pod(topology, ("data", "model"), N, kind)
    rows = mesh.shape["data"]
    traced, forward, parameters = lowered_layers.traced(
        layer, mesh, (LOCAL * rows, T, D), jnp.float32
    )
    both, _ = compiled.dumped(traced.lower())
    if topology == "v5e:4x4":
        forward, _ = compiled.dumped(forward())
    BTD = 4 * LOCAL * T * D
    found = read(both, mesh.size)
    over_heads = [one for one in found if set(one.groups[0]) == set(range(N))]
    over_rows = [one for one in found if set(one.groups[0]) == set(range(0, mesh.size, N))]
    assert len(over_heads) + len(over_rows) * (rows > 1) == len(found)
    assert [(one.kind, one.bytes) for one in over_heads] == [("all-reduce", BTD)] * 2
    assert {one.kind for one in found} == {"all-reduce"}
    assert sum(one.bytes for one in over_rows) == parameters * (rows > 1)
    if topology == "v5e:4x4":
        (one,) = read(forward, mesh.size)
        assert (one.kind, one.bytes, one.groups.shape) == ("all-reduce", BTD, (1, N))
    if kernel == "auto":
        # The kernel for those chips, though this machine has none. 12 matmuls of D by H per token:
        # 4 forward, each with two gradients.
        assert "short_forward" in both
        assert work.flops(Module(both)) == 12 * 2 * LOCAL * T * D * H
        assert work.pallas_flops(traced.jaxpr.jaxpr) > 9 * 2 * LOCAL * T**2 * H / 2


# A layer with 8 heads over 8 devices.
B, BTD = 4, 4 * 4 * 128 * D
LATENT: dict[str, Any] = {"head_dim": 32, "kv_rank": 48, "rope_dim": 32, "rotary": Rotary()}
# Layers, and the bytes that a forward and backward pass all-reduces, each sum over devices once.
SUMMED: dict[str, tuple[nn.Module, int]] = {
    "rotary and causal": (MultiHeadAttention(8, rotary=Rotary(), mask=masks.Causal()), 2 * BTD),
    "grouped": (MultiHeadAttention(16, num_kv_heads=8, qk_norm=QKNorm("rmsnorm")), 2 * BTD),
    # One group's keys and values are replicated: their gradients are summed over devices.
    "gates and one group": (
        MultiHeadAttention(8, num_kv_heads=1, gate="head"), 2 * BTD + 2 * BTD // 8
    ),
    "differential": (DifferentialAttention(8, head_dim=32), 2 * BTD),
    "forgetting": (ForgettingAttention(8), 2 * BTD),
    "chosen blocks": (ChosenBlocksAttention(8, block=16, count=2), 2 * BTD),
    # Gradients of the latents that all heads are projected from: 40 features for queries, 48 for
    # keys and values, and the 32 rotated ones.
    "latent": (MultiHeadLatentAttention(8, q_rank=40, **LATENT), BTD + BTD // D * (40 + 48 + 32)),
    "latent, queries of the input": (
        MultiHeadLatentAttention(8, **LATENT), 2 * BTD + BTD // D * (48 + 32)
    ),
    "gated MLP": (MLP(512, gated=True), 2 * BTD),
    "norms after residuals": (EncoderBlock(MultiHeadAttention(8), 512, pre_norm=False), 4 * BTD),
}  # fmt: skip


def sent(layer: nn.Module, kind: str, rules: Any, *, grad: bool) -> list[tuple[str, int]]:
    """Return the collectives of a layer over v5e:2x4, but for small parameters of all heads."""
    mesh = pod("v5e:2x4", ("data", "model"), 8, kind)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(layer.apply(params, x)))

    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        x = jax.ShapeDtypeStruct((B, 128, D), jnp.float32, sharding=NamedSharding(mesh, P("data")))
        program = jax.grad(loss, (0, 1)) if grad else layer.apply
        text, _ = compiled.dumped(jax.jit(program).lower(described(layer, x), x))
    return [(one.kind, one.bytes) for one in read(text, 8) if one.bytes > 8192]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SUMMED)
def test_gradients_of_projections_are_summed_once(optimized: None, name: str, kind: str) -> None:
    """XLA joins the sums of the gradients of queries, keys and values, but not of the residual."""
    layer, expected = SUMMED[name]
    found = sent(lowered_layers.Residual(layer), kind, sharding.RULES, grad=True)
    assert {kind for kind, _ in found} == {"all-reduce"}
    # And differential attention's few numbers that all heads share.
    assert expected <= sum(size for _, size in found) <= expected + 512


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_a_tied_table_is_summed_once(optimized: None, kind: str) -> None:
    """Of the lookup and the logits together, over 8 devices for rows, with and without FSDP."""
    model, mesh = TokenEmbedding(1024, D), pod("v5e:2x4", ("data", "model"), 1, kind)
    tokens = jax.ShapeDtypeStruct((8, 64), jnp.int32, sharding=NamedSharding(mesh, P("data")))

    def loss(params: Any, tokens: jax.Array) -> Any:
        x = jnp.tanh(model.apply(params, tokens))
        return jnp.sum(jnp.sin(model.apply(params, x, method="logits")))

    for fsdp in (None, "data"):
        rules = (*sharding.RULES, ("embed", fsdp))
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            params = described(model, tokens)
            places = jax.tree.map(lambda a: a.sharding, params)
            program = jax.jit(jax.grad(loss), out_shardings=places).lower(params, tokens)
        found = total(read(compiled.dumped(program)[0], 8))
        found.pop("all-gather", None)
        ((way, (_, size)),) = found.items()
        assert size * (8 if way == "reduce-scatter" else 1) == 4 * 1024 * D


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_heads_are_gathered(optimized: None, kind: str) -> None:
    found: Counter[str] = Counter()
    # XLA shares the gathered queries and keys of this kernel. Kernels on shards gather once more.
    layer = TalkingHeadsAttention(8, kernel="reference")
    for name, size in sent(layer, kind, sharding.RULES, grad=True):
        found[name] += size
    # A reduce-scatter's result is an eighth; the forward one is an all-reduce on TPUs.
    assert found == {"all-gather": 3 * BTD, "reduce-scatter": BTD // 8, "all-reduce": 9 * BTD // 2}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_norms_need_one_gather_and_one_scatter(optimized: None, kind: str) -> None:
    """For each half of a block, each way. The sums are reduce-scattered, not all-reduced."""
    block, rules = EncoderBlock(MultiHeadAttention(8), 512), changed(norm_length="model")
    forward, both = (sent(block, kind, rules, grad=grad) for grad in (False, True))
    assert [kind for kind, _ in forward] == ["all-gather", "reduce-scatter"] * 2
    scattered = [found for found in both if found[0] == "reduce-scatter"]
    assert scattered == [("reduce-scatter", BTD // 8)] * 4
    # XLA gathers what its products read, in bfloat16.
    assert both.count(("all-gather", BTD // 2)) == 4
    # Gradients of norms and biases are summed over positions.
    assert all(kind != "all-reduce" for kind, _ in both)


@pytest.mark.parametrize("kind", KINDS)
def test_usp_sends_least(optimized: None, kind: str) -> None:
    """Groups of u chips exchange heads, and r groups pass keys and values, as on CPUs.

    Gradients of keys and values go round in float32.
    """
    r, u, K, length = 4, 4, 4, 4096
    mesh = pod("v5e:4x4", ("r", "u"), u, kind)
    at = NamedSharding(mesh, P(None, ("r", "u")))
    q, k = (jax.ShapeDtypeStruct((1, length, n, 128), jnp.bfloat16, sharding=at) for n in (8, K))

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        def attend(*qkv: jax.Array) -> jax.Array:
            return dot_product_attention(*qkv, kernel="usp:flex")

        return jax.vjp(attend, q, k, v)[1](dout)

    with jax.set_mesh(mesh), nn.logical_axis_rules([("length", ("r", "u"))]):
        text, _ = compiled.dumped(jax.jit(gradients, out_shardings=(at,) * 3).lower(q, k, k, q))
    sent: Counter[str] = Counter()
    for one in read(text, mesh.size):
        sent[one.kind] += one.times * one.bytes
        assert one.kind != "all-to-all" or sorted(one.groups[0]) == [*range(u)]
    queries, keys_and_values = (2 * length * n * 128 // (r * u) for n in (8, 2 * K))
    exchanged = 3 * queries + 2 * keys_and_values  # The output is not asked for.
    around = 4 * (r - 1) * keys_and_values  # Once forward, again backward, and their gradients.
    assert sent == {"all-to-all": exchanged, "collective-permute": around}


@pytest.mark.parametrize(
    "mask", [masks.Causal(), masks.Window(128, 64), None], ids=["causal", "window", "all"]
)
def test_ring_sends_during_its_steps(optimized: None, mask: masks.Mask | None) -> None:
    """Each hop of a ring of 4 starts before a step's kernel, and is done after it."""
    mesh = pod("v5e:4x4", ("data", "context"), 4)
    at = NamedSharding(mesh, P("data", "context"))
    q, k = (jax.ShapeDtypeStruct((4, 2048, n, 128), jnp.bfloat16, sharding=at) for n in (8, 4))

    def attend(*qkv: jax.Array) -> jax.Array:
        return dot_product_attention(*qkv, mask=mask, kernel="ring:flex")

    with jax.set_mesh(mesh), nn.logical_axis_rules([("length", "context"), ("batch", "data")]):
        text, _ = compiled.dumped(jax.jit(attend, out_shardings=at).lower(q, k, k))
    spans: list[bool] = []
    for computation in Module(text).computations.values():
        under_way: dict[str, bool] = {}
        for x in computation:
            if x.opcode == "collective-permute-start":
                under_way[x.name] = False
            elif x.opcode == "collective-permute-done":
                spans.append(under_way.pop(x.operands[0]))
            # A causal ring leaves steps out on some devices.
            elif x.opcode == "conditional" or "tpu_custom_call" in x.rest:
                under_way = dict.fromkeys(under_way, True)
    # Keys and values, three times around or in a loop, or of the two sides of a window.
    assert len(spans) in (2, 4, 6)
    assert all(spans)
    if isinstance(mask, masks.Window):
        assert total(read(text, mesh.size)) == {"collective-permute": (4, 2 * 2 * 192 * 4 * 128)}


@pytest.mark.parametrize("kind", KINDS)
def test_experts_send_each_token_to_its_experts(optimized: None, kind: str) -> None:
    """Batch and experts over 16 devices: copies of tokens go there and back, in 16 parts."""
    rows, features, top_k = 128, 256, 2
    mesh = pod("v5e:4x4", ("data", "model"), 1, kind)
    module = Experts(512, N, top_k, precision="highest")  # Otherwise some copies are bfloat16.
    at = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((N, rows, features), jnp.float32, sharding=at)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(module.apply(params, x)))

    with jax.set_mesh(mesh), nn.logical_axis_rules(changed(experts="data", mlp=None)):
        params = described(module, x)
        places = jax.tree.map(lambda a: a.sharding, (params, x))
        gradient = jax.jit(jax.grad(loss, (0, 1)), out_shardings=places).lower(params, x).compile()
        forward = jax.jit(module.apply, out_shardings=at).lower(params, x).compile()
    sent = 4 * rows * features * top_k  # a device's copies, all parts together
    for program, times in ((forward, 2), (gradient, 6)):
        found = total(read(program.as_text(), N))
        assert found.pop("ragged-all-to-all") == (times * N, times * sent)
        # Offsets, and the gradient of the router.
        assert "all-gather" not in found
        assert sum(size for _, size in found.values()) < 4 * N * (features + 4 * N * N)
    # With rows for all choices of all tokens, hidden features alone would take 8 MiB.
    assert gradient.memory_analysis().temp_size_in_bytes < 4 * N * rows * 512 * top_k / 2


@pytest.mark.skipif(not products.SHARDED_SUBGROUPS, reason="left to XLA before jaxlib 0.11.2")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_reduce_scattered(optimized: None, kind: str) -> None:
    """A block of 2,048 features over 4 devices for rows and 4 for features."""
    devices = pod("v5e:4x4", ("data", "group"), 4).devices.reshape(4, 1, 4)
    mesh = Mesh(devices, ("data", "model", "group"), axis_types=(KINDS[kind],) * 3)
    layer = MultiHeadAttention(16, head_dim=128, use_bias=False, kernel="reference")
    block = EncoderBlock(layer, 4 * 2048)
    x = jax.ShapeDtypeStruct((16, 512, 2048), jnp.float32, sharding=NamedSharding(mesh, P(ROWS)))

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(block.apply(params, x)))

    with jax.set_mesh(mesh), nn.logical_axis_rules(FSDP):
        params = described(block, jax.ShapeDtypeStruct(x.shape, x.dtype))
        places = jax.tree.map(lambda a: a.sharding, params)
        program = jax.jit(jax.grad(loss), out_shardings=places).lower(params, x).compile()
    kernels = 4 * sum(math.prod(a.shape) for a in jax.tree.leaves(params))
    sent = total(read(program.as_text(), mesh.size))
    # Without the reduce-scatters, the all-reduces are those of all kernels.
    for kind in ("reduce-scatter", "all-reduce"):
        assert abs(sent[kind][1] - kernels / 4) < 0.05 * kernels / 4
