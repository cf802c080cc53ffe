"""Activations that a block stores by name, and recomputes otherwise."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import Decoder, DecoderBlock, MultiHeadAttention
from flax_mha.models import remat
from flax_mha.models.experts import Experts
from flax_mha.positions import Rotary
from tests.support.arrays import random_variables
from tests.support.programs import count_equations

KEY = jax.random.key(0)
T, D = 16, 16
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)
# From the least memory to the most: each stores more than the one before.
POLICIES: tuple[Any, ...] = (
    True, ("z",), ("z", "lse"), ("q", "k", "v", "z", "lse"),
    ("q", "k", "v", "z", "lse", "mlp_pre"), remat.NAMES, False,
)  # fmt: skip


def model(remat: Any, scan: bool = False, **fields: Any) -> Decoder:
    layer = MultiHeadAttention(4, num_kv_heads=2, kernel="blockwise", rotary=Rotary())
    block = DecoderBlock(layer, 32, remat=remat, norm="rmsnorm", gated=True, **fields)
    return Decoder(2, block, scan=scan)


def parameters(scan: bool = False, **fields: Any) -> Any:
    return random_variables(model(False, scan, **fields), X)


def loss(module: Decoder) -> Callable[[Any], jax.Array]:
    """Return the loss, in which dropout takes the same values again if they are recomputed."""
    call = {"deterministic": False, "rngs": {"dropout": jax.random.key(2, impl="unsafe_rbg")}}
    return lambda params: jnp.sum(module.apply(params, X, **call) ** 2)


def stored(fn: Callable[..., Any], *args: Any, capsys: pytest.CaptureFixture) -> tuple[int, str]:
    """Return the bytes that the backward pass reads of float32 activations, and JAX's report."""
    jax.ad_checkpoint.print_saved_residuals(fn, *args)
    report = capsys.readouterr().out
    activations = [line for line in report.splitlines() if "from the argument" not in line]
    shapes = [re.match(r"f32\[([\d,]*)\]", line) for line in activations]
    return 4 * sum(
        int(np.prod([int(n) for n in m[1].split(",") if n])) for m in shapes if m
    ), report


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize(
    ("policy", "scan"),
    [
        (("z", "lse", "offload:mlp_pre"), True), (True, True), (("z", "lse"), False),
        (remat.NAMES, True), ((), False), (["q", "offload:z"], False),
        (jax.checkpoint_policies.dots_saveable, False), (None, True),
        (("products", "offload:z"), True), (("products", "z", "lse"), False),
    ],
)  # fmt: skip
def test_policies_change_no_gradient(policy: Any, scan: bool) -> None:
    # A loop of one layer recomputes as a longer one does.
    fields = {"num_layers": 2 if scan else 1}
    plain, saving = (model(x, scan, dropout_rate=0.2).clone(**fields) for x in (False, policy))
    params = random_variables(plain, X, deterministic=True)
    expected, actual = (jax.jit(jax.value_and_grad(loss(x)))(params) for x in (plain, saving))
    size = max(map(np.max, map(np.abs, jax.tree.leaves(expected[1]))))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * size)


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("scan", [False, True])
def test_each_policy_stores_what_it_names(scan: bool, capsys: pytest.CaptureFixture) -> None:
    params = parameters(scan)
    sizes = [stored(loss(model(each, scan)), params, capsys=capsys)[0] for each in POLICIES]
    assert sizes == sorted(sizes), sizes
    # By hand, for two layers: z [2, T, 16], and two statistics [2, 4, T] of the kernel.
    layer = 4 * 2 * 2 * T
    assert sizes[1] - sizes[0] == layer * D
    assert sizes[2] - sizes[1] == layer * 2 * 4
    assert sizes[3] - sizes[2] == layer * (D + 8 + 8)
    assert sizes[4] - sizes[3] == layer * 2 * 32
    if scan:
        default = stored(loss(model(None, True)), params, capsys=capsys)[0]
        assert sizes[0] < default < 0.6 * sizes[-1]


@pytest.mark.sampled(0.08)
def test_names_are_those_of_the_program(capsys: pytest.CaptureFixture) -> None:
    """With norms of the branches' outputs the backward pass reads every activation."""
    fields: Any = {"branch_norm": True}
    params = parameters(**fields)
    report = stored(loss(model(remat.NAMES, **fields)), params, capsys=capsys)[1]
    assert {*re.findall(r"named '(\w+)'", report)} == {*remat.NAMES}
    text = str(jax.make_jaxpr(jax.grad(loss(model(False, **fields))))(params))
    assert {*re.findall(r"name\[name=(\w+)\]", text)} == {*remat.NAMES}


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("mlp", [None, Experts(8, num_experts=4, top_k=2)])
def test_scan_repeats_no_product_by_default(mlp: Any) -> None:
    """A step's program has every product that it has if all is stored, and no barriers."""
    layer = MultiHeadAttention(4, num_kv_heads=2, kernel="blockwise", normalize_qk=True)
    mlp_dim = 32 if mlp is None else None
    block = DecoderBlock(layer, mlp_dim, gated=mlp is None, mlp=mlp, cross_attention=layer.copy())

    def program(remat: Any) -> Any:
        module = Decoder(2, block.copy(remat=remat), scan=True)
        params = jax.eval_shape(module.init, KEY, X, X)["params"]
        run = jax.grad(lambda params: jnp.sum(module.apply({"params": params}, X, X) ** 2))
        return jax.jit(run).trace(params)

    traced = [program(remat) for remat in (False, None, True)]
    products = [count_equations(x.jaxpr, "dot_general") for x in traced]
    assert products[1] <= products[0] < products[2]
    # `jax.checkpoint` adds barriers when it is lowered, unless it is told that none are needed.
    barriers = [x.lower().as_text().count("optimization_barrier") for x in traced]
    assert barriers[1] <= barriers[0]


@pytest.mark.sampled(0.08)
def test_default_stores_all_without_scan_and_while_decoding() -> None:
    plain = str(jax.make_jaxpr(jax.grad(loss(model(None))))(parameters()))
    assert "checkpoint" not in plain
    assert "remat" not in plain
    module = model(None, True)
    decoding = module.clone(block=module.block.clone(
        attention=module.block.attention.clone(decode=True, kernel="auto")
    ))  # fmt: skip
    step = jax.make_jaxpr(lambda v, x: decoding.apply(v, x, mutable=["cache"]))
    assert "remat" not in str(step(jax.eval_shape(decoding.init, KEY, X), X[:, :1]))


@pytest.mark.parametrize(
    ("policy", "got"),
    [
        (("z", "lsd"), r"'lsd'"), ("z", "'z' of str"), (1, "1 of int"),
        (("z", "offload:z"), "offload:z"), ((3,), r"\(3,\)"), (("offload:",), "offload:"),
    ],
)  # fmt: skip
def test_wrong_policies_name_those_that_exist(policy: Any, got: str) -> None:
    names = ", ".join(remat.NAMES)
    with pytest.raises(ValueError, match=f"remat must be .* names among {names}, .*, got .*{got}"):
        jax.eval_shape(model(policy).init, KEY, X)
