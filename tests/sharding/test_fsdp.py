"""FSDP: kernels are gathered for their products, and their gradients reduce-scattered."""

import importlib.util
import math
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.plan.collectives import read
from flax_mha import MLP, Encoder, EncoderBlock, MultiHeadAttention, sharding
from flax_mha import nnx as flax_mha_nnx
from flax_mha.positions import Rotary
from flax_mha.sharding import products
from tests.support.meshes import (
    BACKWARD,
    FORWARD,
    KEY,
    KINDS,
    RNG,
    changed,
    collectives,
    described,
    on,
)
from tests.support.oracle import error, random_like

X = jnp.asarray(RNG.normal(size=(8, 16, 32)), jnp.float32)
# Rows over ("data", "group"), model features of parameters over "group".
ROWS = ("data", "group")
FSDP = changed(batch=ROWS, embed="group")
# Without rotation, the softmax cancels the key bias: its gradient would be 0.
LAYER = MultiHeadAttention(8, num_kv_heads=2, gate="head", rotary=Rotary())
_GATHERED = pytest.mark.skipif(
    not products.SHARDED_SUBGROUPS, reason="left to XLA before jaxlib 0.11.2"
)
BLOCK = EncoderBlock(MultiHeadAttention(8, rotary=Rotary()), 64, gated=True)
CASES: dict[str, tuple[nn.Module, Any]] = {
    "layer": (LAYER, FSDP),
    "layer with one key head": (MultiHeadAttention(8, num_kv_heads=1, rotary=Rotary()), FSDP),
    "MLP": (MLP(64), FSDP),
    "block with sharded norms": (BLOCK, changed(batch=ROWS, embed="group", norm_length="model")),
    "scanned and recomputed": (
        Encoder(2, EncoderBlock(LAYER, 64, norm="rmsnorm", remat=True), scan=True), FSDP,
    ),
    "two layers": (Encoder(2, BLOCK), FSDP),
    "rows over one axis": (BLOCK, changed(batch="data", embed="data")),
    "both axes for both": (LAYER, changed(batch=ROWS, embed=ROWS)),
    "rows elsewhere": (BLOCK, changed(batch="data", embed="group")),
    "positions over an axis": (
        BLOCK,
        changed(batch=ROWS, embed="group", length="model", heads=None, kv_heads=None, mlp=None),
    ),
}  # fmt: skip


def gradients(model: nn.Module) -> Any:
    def loss(params: Any, x: jax.Array) -> Any:
        out = model.apply(params, x)
        return jnp.sum(jnp.sin(3 * out)), out

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


@pytest.mark.sampled(0.025)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_layers_match_one_device(name: str, kind: str) -> None:
    model, rules = CASES[name]
    params = random_like(jax.eval_shape(model.init, KEY, X))
    wanted, out = gradients(model)(params, X)
    mesh, leave = on(kind, rules, (2, 2, 2))
    try:
        places = jax.tree.map(lambda x: x.sharding, described(model, X))
        x = jax.device_put(X, NamedSharding(mesh, P(dict(rules)["batch"])))
        got, got_out = jax.device_get(gradients(model)(jax.device_put(params, places), x))
    finally:
        leave()
    assert error(got_out, out) < 5 * FORWARD
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) < 2 * BACKWARD


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_left_to_xla_on_cpus(kind: str) -> None:
    """XLA:CPU aborts the process at the reduce-scattered gradients of bfloat16."""
    model = LAYER.clone(dtype=jnp.bfloat16)
    params = random_like(jax.eval_shape(model.init, KEY, X))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply(params, x).astype(jnp.float32) * x)

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    wanted = gradient(params, X)
    mesh, leave = on(kind, FSDP, (2, 2, 2))
    try:
        places = jax.tree.map(lambda x: x.sharding, described(model, X))
        x = jax.device_put(X, NamedSharding(mesh, P(ROWS)))
        got = jax.device_get(gradient(jax.device_put(params, places), x))
    finally:
        leave()
    a, b = (np.concatenate([x.ravel() for x in jax.tree.leaves(tree)]) for tree in (got, wanted))
    assert error(a, b) < 0.05


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("kind", KINDS)
def test_nnx_layer_matches_one_device(kind: str) -> None:
    def gradients(m: Any, x: jax.Array) -> Any:
        return m(x), nnx.grad(lambda m, x: jnp.sum(jnp.sin(3 * m(x))), argnums=(0, 1))(m, x)

    layer = flax_mha_nnx.MultiHeadAttention(8, 32, rotary=Rotary(), rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    state = jax.tree.map(lambda x: jnp.asarray(RNG.normal(size=x.shape) / 4, x.dtype), state)
    layer = nnx.merge(graph, state)
    wanted = nnx.jit(gradients)(layer, X)
    mesh, leave = on(kind, FSDP, (2, 2, 2))
    try:
        x = jax.device_put(X, NamedSharding(mesh, P(ROWS)))
        got = jax.device_get(nnx.jit(gradients)(nnx.merge(graph, jax.device_get(state)), x))
    finally:
        leave()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) < 2 * BACKWARD


@_GATHERED
@pytest.mark.sampled(0.25, slow=0.2)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_reduce_scattered(optimized: None, kind: str) -> None:
    """Over d = m = f = 2 devices for rows, heads and features, P the kernels' bytes:

    all-gathers of P/m, reduce-scatters to P/(m·f), all-reduces of these over d.
    """
    d, m, f = 2, 2, 2
    layer = MultiHeadAttention(8, use_bias=False)
    mesh, leave = on(kind, FSDP, (d, m, f))
    try:
        params = described(layer, X)
        places = jax.tree.map(lambda x: x.sharding, params)

        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(layer.apply(params, x)))

        x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P(ROWS)))
        gradient = jax.jit(jax.grad(loss), out_shardings=places)
        text = gradient.lower(params, x).compile().as_text()
    finally:
        leave()
    kernels = 4 * sum(math.prod(w.shape) for w in jax.tree.leaves(params))
    sent: Counter[str] = Counter()
    for collective, size in collectives(text):
        sent[collective] += size
    output = X.nbytes // (d * f)  # The gradient of x is not asked for.
    assert sent == {
        "all-gather": kernels // m,
        "reduce-scatter": kernels // (m * f),
        "all-reduce": kernels // (m * f) + output,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_programs_without_fsdp_stay_the_same(kind: str, monkeypatch: Any) -> None:
    """The rule for `embed` is missing, or names an axis of devices with the same rows."""

    def plain(
        parallel: Any, multiply: Any, names: Any, rows: Any, contracted: int, x: Any, kernel: Any
    ) -> Any:
        kernel = sharding.constrain(kernel, products.gathered(names))
        return parallel(multiply, names, rows, contracted, x, kernel)

    lowered: dict[bool, list[str]] = {}
    for is_plain in (False, True):
        if is_plain:
            monkeypatch.setattr(products, "product", plain)
        lowered[is_plain] = []
        for rules in (changed(), changed(norm_length="model"), changed(embed="group"), FSDP):
            _, leave = on(kind, rules, (2, 2, 2))
            try:
                text = gradients(BLOCK).lower(described(BLOCK, X), X).as_text()
            finally:
                leave()
            lowered[is_plain].append(text)
    same = [a == b for a, b in zip(lowered[False], lowered[True], strict=True)]
    assert same == [True, True, True, not products.SHARDED_SUBGROUPS]


@_GATHERED
@pytest.mark.sampled(0)
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_reduce_scattered_on_tpu(optimized: None, kind: str) -> None:
    """A block of 2,048 features over 4 devices for rows and 4 for features."""
    chips = np.array(topologies.get_topology_desc("v5e:4x4", "tpu").devices).reshape(4, 1, 4)
    mesh = Mesh(chips, ("data", "model", "group"), axis_types=(KINDS[kind],) * 3)
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
    sent: Counter[str] = Counter()
    for one in read(program.as_text(), mesh.size):
        sent[one.kind] += one.bytes
    # Without the reduce-scatters, the all-reduces are those of all kernels.
    for kind in ("reduce-scatter", "all-reduce"):
        assert abs(sent[kind] - kernels / 4) < 0.05 * kernels / 4
