"""Experts against a loop over tokens, on one device and on meshes."""

import functools
import os
import socket
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.plan.collectives import read, total
from flax_mha import Decoder, DecoderBlock, Experts, MultiHeadAttention, sharding
from flax_mha.models import exchange, experts
from tests.kernels.cases import pairs
from tests.support.meshes import BACKWARD, FORWARD, KINDS, changed, described, on
from tests.support.oracle import error, random_like

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 8, 16)), jnp.float32)
PLAIN = Experts(24, 8, 2)
# Every option, as in gpt-oss, and a limit that many features reach.
CLIPPED = Experts(
    24, 8, 3, activation="quick_gelu", limit=0.5, offset=1.0, use_bias=True, normalize=True
)
KINDS_OF = {"plain": PLAIN, "clipped": CLIPPED, "as they are": PLAIN.clone(normalize=False),
            "all": PLAIN.clone(top_k=8), "one": Experts(24, 1, 1)}  # fmt: skip
METHODS = {"in turn": {"cpu": experts.expert_by_expert}, "by rows": {}, "sent": {}}


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with each method, whichever the platform would choose."""
    monkeypatch.setattr(experts, "METHODS", METHODS[request.param])
    if request.param == "sent":
        monkeypatch.setattr(exchange, "SENDING", ("cpu",))
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    return request.param


def ragged_all_to_all(
    operand: Any, output: Any, input_offsets: Any, send_sizes: Any, output_offsets: Any,
    recv_sizes: Any, *, axis_name: Any,
) -> Any:  # fmt: skip
    """Do what `jax.lax.ragged_all_to_all` does, which XLA lacks on CPUs."""
    arrays = (operand, input_offsets, send_sizes, output_offsets)
    operands, inputs, sizes, outputs = (jax.lax.all_gather(x, axis_name) for x in arrays)
    me, at = jax.lax.axis_index(axis_name), jnp.arange(len(output))
    begin, size = outputs[:, me], sizes[:, me]
    is_from = (at[:, None] >= begin[None]) & (at[:, None] < (begin + size)[None])
    sender = jnp.argmax(is_from, 1)
    rows = operands[sender, inputs[sender, me] + at - begin[sender]]
    rows = jnp.where(is_from.any(1)[:, None], rows, output)
    return jnp.where(jnp.all(size == recv_sizes), rows, jnp.nan)


def parameters(module: Experts) -> Any:
    return random_like(jax.eval_shape(module.init, KEY, X))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def expected_output(module: Experts, params: Any, x: Any) -> np.ndarray:
    """Compute one token after another, in float64."""
    w = {name: np.asarray(a, np.float64) for name, a in params.items() if name != "router"}
    router = {name: np.asarray(a, np.float64) for name, a in params["router"].items()}
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for at in np.ndindex(*x.shape[:-1]):
        logits = x[at] @ router["kernel"] + router.get("bias", 0)
        p = np.exp(logits) / np.exp(logits).sum()
        chosen = np.argsort(-p)[: module.top_k]
        whole = p[chosen].sum() if module.normalize else 1
        for e in chosen:
            gate, up = (x[at] @ w[f"{n}_kernel"][e] for n in ("gate", "up"))
            if module.use_bias:
                gate, up = gate + w["gate_bias"][e], up + w["up_bias"][e]
            if module.limit is not None:
                gate, up = np.minimum(gate, module.limit), np.clip(up, -module.limit, module.limit)
            slope = 1.702 if module.activation == "quick_gelu" else 1
            h = gate * sigmoid(slope * gate) * (up + module.offset)
            y = h @ w["down_kernel"][e] + (w["down_bias"][e] if module.use_bias else 0)
            out[at] += p[e] / whole * y
    return out


def compiled(module: Experts) -> Any:
    """Return the outputs by the method in force; JAX would take equal methods for one function."""
    return jax.jit(lambda *args: module.apply(*args))


def run(module: Experts, params: Any, x: Any) -> tuple[Any, Any]:
    """Return the gradients and the output."""

    def loss(params: Any, x: Any) -> Any:
        y = module.apply(params, x)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)


@pytest.mark.parametrize("name", KINDS_OF)
def test_experts_match_formula(name: str, method: str) -> None:
    params = parameters(KINDS_OF[name])
    expected = expected_output(KINDS_OF[name], params["params"], X)
    assert error(compiled(KINDS_OF[name])(params, X), expected) < 2e-6
    if name == "plain":  # Without a batch, and with two axes of it.
        assert error(compiled(PLAIN)(params, X[0]), expected[0]) < 2e-6
        assert error(compiled(PLAIN)(params, X[None]), expected[None]) < 2e-6


def test_gradients_match_differences(method: str) -> None:
    """Finite differences of the formula along random directions."""
    params = parameters(CLIPPED)
    (of_params, of_x), _ = run(CLIPPED, params, X)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def loss(params: Any, x: Any) -> float:
        return float(np.sin(expected_output(CLIPPED, params["params"], x)).sum())

    rng, step = np.random.default_rng(1), 1e-6
    leaves, tree = jax.tree.flatten((wide, np.asarray(X, np.float64)))
    got = jax.tree.leaves((of_params, of_x))
    assert len(got) == len(leaves) == 9
    for i, (leaf, gradient) in enumerate(zip(leaves, got, strict=True)):
        along = rng.normal(size=leaf.shape)
        both = []
        for sign in (1, -1):
            moved = [a + sign * step * along if j == i else a for j, a in enumerate(leaves)]
            both.append(loss(*jax.tree.unflatten(tree, moved)))
        wanted = (both[0] - both[1]) / (2 * step)
        assert abs(np.vdot(gradient, along) - wanted) < 1e-4 * np.linalg.norm(gradient)


def test_tokens_do_not_affect_each_other(method: str) -> None:
    """NaN in one token, or an overflow in another's expert, reaches no other token."""
    params = parameters(PLAIN)
    apply = compiled(PLAIN)
    clean, dirty = apply(params, X), apply(params, X.at[0, 3].set(jnp.nan).at[1, 2].set(1e30))
    rest = np.ones(X.shape[:-1], bool)
    rest[0, 3] = rest[1, 2] = False
    np.testing.assert_allclose(dirty[rest], clean[rest], atol=1e-6)
    # A token never passes through an expert that it is not routed to, not even to be discarded.
    one = jnp.ones((1, 1, 16))
    params["params"]["router"]["kernel"] = np.tile(-np.arange(8, dtype="f"), (16, 1))
    params["params"]["up_kernel"][2:] = 3e38  # Their sum is infinite.
    (of_params, of_x), y = run(PLAIN, params, one)
    assert np.isfinite(y).all()
    assert np.isfinite(of_x).all()
    assert all(np.isfinite(x[:2]).all() for x in jax.tree.leaves(of_params))


def test_padding_does_not_affect_experts(method: str) -> None:
    block = DecoderBlock(MultiHeadAttention(2), mlp=CLIPPED, norm="rmsnorm")
    lengths = jnp.array([8, 3, 5, 0])
    real = np.arange(8)[None] < lengths[:, None]
    params = random_like(jax.eval_shape(block.init, KEY, X))

    def loss(params: Any, x: Any) -> Any:
        y = block.apply(params, x, lengths=lengths)
        return jnp.sum(jnp.where(real[..., None], jnp.sin(y), 0)), y

    fn = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    (got, of_x), y = fn(params, jnp.where(real[..., None], X, jnp.nan))
    (wanted, _), expected = fn(params, X)
    np.testing.assert_allclose(y[real], expected[real], atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)
    assert not np.any(of_x[~real])


def test_bfloat16_experts_are_close(method: str) -> None:
    every = CLIPPED.clone(top_k=8)  # With all experts, no choice depends on the last digit.
    params = parameters(every)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    y = compiled(every)(half, X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda a: np.asarray(a, np.float32), half)
    x = X.astype(jnp.bfloat16).astype(jnp.float32)
    assert error(y.astype(jnp.float32), expected_output(every, wide["params"], x)) < 0.02
    cast = jax.eval_shape(every.clone(dtype=jnp.bfloat16).apply, params, X)
    assert cast.dtype == jnp.bfloat16


def test_experts_start_differently() -> None:
    """With the scale of a single kernel, as in `MLP`."""
    kernels = Experts(512, 4, 1).init(KEY, jnp.ones((1, 1, 256)))["params"]["up_kernel"]
    np.testing.assert_allclose(jnp.std(kernels, (1, 2)), 256**-0.5, rtol=0.02)
    assert np.abs(kernels[0] - kernels[1]).max() > 0.01


@pytest.mark.slow
def test_experts_under_scan_and_remat_match_loop() -> None:
    block = DecoderBlock(MultiHeadAttention(2), mlp=PLAIN)
    plain, scanned = Decoder(2, block), Decoder(2, block.clone(remat=True), scan=True)
    params = random_like(jax.eval_shape(plain.init, KEY, X))["params"]
    both = [params.pop(f"layers_{i}") for i in range(2)]
    stacked = params | {"layers": jax.tree.map(lambda *x: np.stack(x), *both)}
    unstacked = params | {f"layers_{i}": x for i, x in enumerate(both)}
    wanted = run(plain, {"params": unstacked}, X)
    got = run(scanned, {"params": stacked}, X)
    assert error(got[1], wanted[1]) < FORWARD
    assert error(got[0][1], wanted[0][1]) < BACKWARD


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
def on_one_device(method: str) -> Any:
    """Return parameters, and the method's output with them."""
    params = jax.jit(CLIPPED.init)(KEY, X)
    bias = {name: x for name, x in parameters(CLIPPED)["params"].items() if "bias" in name}
    params = {"params": params["params"] | bias}
    return jax.device_get((params, run(CLIPPED, params, X)))


# All pairs of these occur, not their whole product.
@pytest.mark.sampled(0.12)
@pytest.mark.parametrize(
    ("name", "kind", "method"),
    pairs(name=(*RULES,), kind=(*KINDS,), method=(*METHODS,)),
    indirect=["method"],
)
def test_sharded_experts_match_one_device(name: str, kind: str, method: str) -> None:
    params, wanted = on_one_device(method)
    mesh, leave = on(kind, RULES[name])
    try:
        places = sharding.of(CLIPPED.init, KEY, X)
        x = jax.device_put(X, NamedSharding(mesh, P("data" if name != "both" else None)))
        got = jax.device_get(run(CLIPPED, jax.device_put(params, places), x))
    finally:
        leave()
    if name in ("experts divided", "both", "some rules") or name.startswith("over "):
        assert places["params"]["gate_kernel"].spec[0] is not None
    assert error(got[1], wanted[1]) < FORWARD
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(wanted[0]), strict=True):
        assert error(a, b) < BACKWARD


def test_two_shardings_over_one_axis_raise() -> None:
    _, leave = on("Auto", changed(experts="model"))
    try:
        with pytest.raises(
            ValueError, match="'experts' is to be sharded over 'model', which another"
        ):
            sharding.init(PLAIN, KEY, X)
    finally:
        leave()


def test_expert_by_expert_needs_memory_of_one_expert() -> None:
    """On CPUs `ragged_dot` computes all experts at once."""
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    module = Experts(128, 16, 2)
    params = jax.eval_shape(module.init, KEY, x)
    compiled = jax.jit(module.apply).lower(params, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 512 * 128 * 4 / 4


def test_exchange_sends_tokens_and_no_weights(optimized: None) -> None:
    """On CPUs, devices gather the tokens of each part, and scatter the sums of the outputs."""
    n, (rows, features), top_k = 8, (128, 64), 2
    module = Experts(96, n, top_k)
    x = jnp.zeros((n, rows, features))
    mesh, leave = on("Auto", changed(experts="data", mlp=None), (n, 1))
    try:
        params = described(module, x)
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
        places = jax.tree.map(lambda a: a.sharding, (params, x))
        programs = [
            jax.jit(module.apply, out_shardings=places[1]).lower(params, x).compile(),
            jax.jit(lambda *args: run(module, *args)[0], out_shardings=places)
            .lower(params, x).compile(),
        ]  # fmt: skip
    finally:
        leave()
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


@pytest.mark.parametrize("name", ["the tokens' axis", "an own axis"])
def test_device_needs_the_memory_of_its_share(name: str, method: str, optimized: None) -> None:
    """With rows for all choices of all tokens, each array of hidden features would take 16 MiB."""
    module, rows, features = Experts(1024, 8, 2), 2048, 64
    axis = "data" if name == "the tokens' axis" else "model"
    mesh, leave = on("Auto", changed(experts=axis, mlp=None), (8, 1) if axis == "data" else (1, 8))
    try:
        x = jax.ShapeDtypeStruct((8, rows // 8, features), jnp.float32,
                                 sharding=NamedSharding(mesh, P("data")))  # fmt: skip
        params = described(module, x)
        places = jax.tree.map(lambda a: a.sharding, (params, x))
        fn = jax.jit(lambda *args: run(module, *args)[0], out_shardings=places)
        temporaries = fn.lower(params, x).compile().memory_analysis().temp_size_in_bytes
    finally:
        leave()
    assert temporaries < 16 * 2**20


@pytest.mark.slow
def test_experts_over_two_processes_match_one_device() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.models.expert_process", address, str(i)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, errors) in zip(processes, told, strict=True):
        assert process.returncode == 0, errors
        assert float(out.splitlines()[-1]) < BACKWARD


def balance(logits: Any, top_k: int) -> tuple[float, np.ndarray]:
    """Return the balance loss of logits [n, E], and its gradient, in float64."""
    p = np.exp(np.asarray(logits, np.float64))
    p /= p.sum(-1, keepdims=True)
    n, E = p.shape
    chosen = np.zeros(E)
    for row in p:
        chosen[np.argsort(-row)[:top_k]] += 1 / (n * top_k)
    gradient = E / n * p * (chosen - (p * chosen).sum(-1, keepdims=True))
    return float(E * np.sum(chosen * p.mean(0))), gradient


def sown(module: Any, params: Any, x: Any) -> tuple[Any, Any]:
    """Return the sum of balance losses, and the intermediates."""
    _, state = module.apply(params, x, mutable=["intermediates"])
    flat = jax.tree.leaves_with_path(state["intermediates"])
    losses = [jnp.sum(x) for path, x in flat if "balance_loss" in jax.tree_util.keystr(path)]
    return sum(losses), state["intermediates"]


def check_balance(module: Experts, params: Any, x: Any, router: Any) -> None:
    """Check the sown logits and the loss, with its gradient for the router."""
    grad = jax.jit(jax.grad(functools.partial(sown, module), has_aux=True))
    of_params, found = jax.device_get(grad(params, x))
    wide = np.asarray(X, np.float64).reshape(-1, 16)
    logits = wide @ router["kernel"] + router.get("bias", 0)
    wanted, gradient = balance(logits, module.top_k)
    assert error(found["router_logits"][0].reshape(logits.shape), logits) < FORWARD
    assert abs(found["balance_loss"][0] - wanted) < 1e-6
    assert error(of_params["params"]["router"]["kernel"], wide.T @ gradient) < BACKWARD


@pytest.mark.parametrize("name", ["plain", "clipped", "one"])
def test_balance_loss_matches_formula(name: str) -> None:
    params = parameters(KINDS_OF[name])
    assert "intermediates" not in KINDS_OF[name].init(KEY, X)
    check_balance(KINDS_OF[name], params, X, params["params"]["router"])


@pytest.mark.parametrize("kind", KINDS)
def test_balance_loss_counts_the_tokens_of_all_devices(kind: str) -> None:
    params = parameters(CLIPPED)
    mesh, leave = on(kind, changed(experts="data", length="model", mlp=None, heads=None))
    try:
        placed = jax.device_put(params, sharding.of(CLIPPED.init, KEY, X))
        x = jax.device_put(X, NamedSharding(mesh, P("data", "model")))
        check_balance(CLIPPED, placed, x, params["params"]["router"])
    finally:
        leave()


def test_balance_loss_of_each_layer_under_scan() -> None:
    block = DecoderBlock(MultiHeadAttention(2), mlp=PLAIN, remat=True)
    model = Decoder(2, block, scan=True)
    params = random_like(jax.eval_shape(model.init, KEY, X))
    total, found = jax.jit(functools.partial(sown, model))(params, X)
    (layer,) = (x for x in jax.tree.leaves(found, is_leaf=lambda x: "router_logits" in x))
    (logits,), (losses,) = layer["router_logits"], layer["balance_loss"]
    assert logits.shape == (2, 4, 8, 8)
    wanted = [balance(x.reshape(-1, 8), 2)[0] for x in logits]
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    np.testing.assert_allclose(total, sum(wanted), rtol=1e-6)
