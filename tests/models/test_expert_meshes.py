"""Experts on meshes: equality with one device, and the bytes that devices send."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.plan.collectives import read
from flax_mha import Experts, sharding
from tests.kernels.cases import pairs
from tests.models.expert_cases import (
    CLIPPED,
    KEY,
    KINDS_OF,
    METHODS,
    PLAIN,
    X,
    check_balance,
    run,
    use,
)  # fmt: skip
from tests.support.arrays import random_variables
from tests.support.meshes import BACKWARD, FORWARD, KINDS, changed, described, on, total
from tests.support.oracle import error


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with each method."""
    use(request.param, monkeypatch)
    return request.param


RULES = {
    "features divided": sharding.RULES,
    "experts divided": changed(experts="model", mlp=None),
    "both": changed(experts="data", batch=None),
    "over the tokens' axis, and features": changed(experts="data"),
    "over the tokens' axis": changed(experts="data", mlp=None),
    "over all axes of tokens": changed(
        length="model", experts=("data", "model"), mlp=None, heads=None, kv_heads=None
    ),
    "over one axis of tokens and one more": changed(experts=("model", "data"), mlp=None),
    "over the sequence": changed(
        length="model", experts="model", mlp=None, heads=None, kv_heads=None
    ),
    "over the sequence, and features": changed(
        batch=None, length="model", experts="model", mlp="data", heads=None, kv_heads=None
    ),
    "features over the tokens' axis": changed(mlp="data"),
    "sequence parallel norms": changed(norm_length="model"),
    "tokens divided": changed(length="model", mlp=None, heads=None, kv_heads=None),
    "FSDP": changed(embed="data"),
    "some rules": (("experts", "model"),),
}


@functools.cache
def on_one_device(module: Experts, method: str) -> Any:
    """Return parameters, and the method's output with them."""
    params = random_variables(module, X)
    return jax.device_get((params, run(module, params, X)))


# All pairs of these occur, not their whole product.
@pytest.mark.sampled(0.012)
@pytest.mark.parametrize(
    ("experts", "name", "kind", "method"),
    pairs(experts=("clipped", "grouped"), name=(*RULES,), kind=(*KINDS,), method=(*METHODS,)),
    indirect=["method"],
)
def test_sharded_experts_match_one_device(experts: str, name: str, kind: str, method: str) -> None:
    """With clipped features, or groups of experts with a choice bias and a shared MLP."""
    module = KINDS_OF[experts]
    params, wanted = on_one_device(module, method)
    with on(kind, RULES[name]) as mesh:
        places = sharding.of(module.init, KEY, X)
        x = jax.device_put(X, NamedSharding(mesh, P("data" if name != "both" else None)))
        got = jax.device_get(run(module, jax.device_put(params, places), x))
    if name in ("experts divided", "both", "some rules") or name.startswith("over "):
        assert places["params"]["gate_kernel"].spec[0] is not None
    assert error(got[1], wanted[1]) < FORWARD
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(wanted[0]), strict=True):
        assert error(a, b) < BACKWARD


def test_two_shardings_over_one_axis_raise() -> None:
    with (
        on("Auto", changed(experts="model")),
        pytest.raises(ValueError, match="'experts' is to be sharded over 'model', which another"),
    ):
        sharding.init(PLAIN, KEY, X)


@pytest.mark.sampled(0.08)
def test_exchange_sends_tokens_and_no_weights(optimized: None) -> None:
    """On CPUs, devices gather the tokens of each part, and scatter the sums of the outputs."""
    n, (rows, features), top_k = 8, (128, 64), 2
    module = Experts(96, n, top_k)
    x = jnp.zeros((n, rows, features))
    with on("Auto", changed(experts="data", mlp=None), (n, 1)) as mesh:
        params = described(module, x)
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
        places = jax.tree.map(lambda a: a.sharding, (params, x))
        programs = [
            jax.jit(module.apply, out_shardings=places[1]).lower(params, x).compile(),
            jax.jit(lambda *args: run(module, *args)[0], out_shardings=places)
            .lower(params, x).compile(),
        ]  # fmt: skip
    forward, both = (total(read(program.as_text(), n)) for program in programs)
    tokens, choices, parts = 4 * n * rows * features, 4 * n * rows * top_k, n
    assert forward == {
        "all-gather": (3 * parts, tokens + 2 * choices),
        "reduce-scatter": (parts, tokens // n),
    }
    # Each part is gathered again, and so are the gradients of the outputs.
    assert both == {
        "all-gather": (7 * parts, 3 * tokens + 4 * choices),
        "reduce-scatter": (3 * parts, (2 * tokens + choices) // n),
        "all-reduce": (1, 4 * n * features),
    }


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_experts_are_reduce_scattered(optimized: None, kind: str) -> None:
    """Under FSDP. Each device's gradients of kernels are summed into the part that it keeps."""
    module, x = Experts(96, 4, 2), jnp.zeros((8, 16, 64))
    with on(kind, changed(embed="data", mlp=None), (8, 1)) as mesh:
        params = described(module, x)
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
        places = jax.tree.map(lambda a: a.sharding, params)
        gradient = jax.jit(lambda *args: run(module, *args)[0][0], out_shardings=places)
        found = total(read(gradient.lower(params, x).compile().as_text(), 8))
    kernels = 4 * 3 * 4 * 64 * 96
    assert found["reduce-scatter"][1] >= kernels // 8
    assert found.get("all-reduce", (0, 0))[1] < kernels // 8


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("kind", KINDS)
def test_balance_loss_counts_the_tokens_of_all_devices(kind: str) -> None:
    params = random_variables(CLIPPED, X)
    with on(kind, changed(experts="data", length="model", mlp=None, heads=None)) as mesh:
        placed = jax.device_put(params, sharding.of(CLIPPED.init, KEY, X))
        x = jax.device_put(X, NamedSharding(mesh, P("data", "model")))
        check_balance(CLIPPED, placed, x, params["params"]["router"])
