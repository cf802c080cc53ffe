"""Points of a layer, read and edited, against the same layer changed by hand, and wrong edits."""

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

import flax_mha
from flax_mha import Capture, MultiHeadAttention, edits, masks, positions
from flax_mha.base.tensors import TENSORS
from flax_mha.edits import Edit
from tests.support import oracle

B, T, D, N, K, H = 2, 6, 16, 4, 2, 4
POINTS = ("q", "k", "v", "scores", "weights", "z", "result", "out")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
OTHER = RNG.normal(size=(B, T, D)).astype(np.float32)
SHAPES = {
    "q": (B, T, N, H), "k": (B, T, K, H), "v": (B, T, K, H), "scores": (B, N, T, T),
    "weights": (B, N, T, T), "z": (B, T, N, H), "result": (B, T, N, D), "out": (B, T, D),
}  # fmt: skip
LAYERS = {
    "grouped": MultiHeadAttention(N, num_kv_heads=K, mask=masks.Causal()),
    "rotary": MultiHeadAttention(
        N, num_kv_heads=K, rotary=positions.Rotary(), sinks=True, mask=masks.Window(2, 0)
    ),
    "gate": MultiHeadAttention(N, num_kv_heads=K, gate="head", normalize_qk=True),
}


def variables(module: nn.Module, *inputs: Any) -> Any:
    """Return random variables, none of whose values is 0."""
    return oracle.random_like(jax.eval_shape(module.init, jax.random.key(0), *inputs))


def clamp(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -0.3, 0.3)


def some_edit(name: str) -> Edit:
    """Return an edit that scales, removes and adds, other numbers at each place."""
    shape = SHAPES[name]
    keep = RNG.normal(size=shape).astype(np.float32)
    return Edit(np.where(RNG.random(shape) < 0.3, 0, keep), RNG.normal(size=shape))


def expected(params: Any, x: np.ndarray, changes: Mapping[str, Edit], kind: str) -> np.ndarray:
    """Return the output of a layer in float64, with each tensor changed by hand."""

    def change(name: str, y: np.ndarray) -> np.ndarray:
        if name not in changes:
            return y
        edit = changes[name]
        y = oracle.float64(edit.keep) * y + oracle.float64(edit.add)
        return np.clip(y, -0.3, 0.3) if edit.fn is clamp else y

    q, k, v = (oracle.project(params[name], x) for name in ("query", "key", "value"))
    i, j = np.arange(T)[:, None], np.arange(T)
    allowed = np.ones((T, T), bool)
    if kind == "gate":
        q, k = oracle.layer_norm(params["query_ln"], q), oracle.layer_norm(params["key_ln"], k)
    elif kind == "rotary":
        q, k = (oracle.rotary(y, np.arange(T)) for y in (q, k))
        allowed = (i - j >= 0) & (i - j <= 2)
    else:
        allowed = j <= i
    q, k, v = change("q", q), change("k", k), change("v", v)
    k, v = (np.repeat(y, N // K, -2) for y in (k, v))
    scores = change("scores", np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(H))
    weights = np.exp(np.where(allowed, scores, -np.inf))
    total = weights.sum(-1, keepdims=True)
    if "sinks" in params:
        total = total + np.exp(oracle.float64(params["sinks"]))[:, None, None]
    weights = np.where(allowed, change("weights", weights / total), 0)  # A mask is never undone.
    z = change("z", np.einsum("bnts,bsnh->btnh", weights, v))
    if "output_gate" in params:
        z = z / (1 + np.exp(-oracle.project(params["output_gate"], x)))
    kernel = oracle.float64(params["out"]["kernel"])
    result = change("result", np.einsum("btnh,nhd->btnd", z, kernel))
    return change("out", result.sum(-2) + oracle.float64(params["out"]["bias"]))


def named(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"attention_{name}": edit for name, edit in changes.items()}


def with_edits(layer: nn.Module, values: Any, changes: Any) -> Any:
    """Return the output, and the gradients of edits of Σ out · OTHER."""

    def loss(changes: Any) -> Any:
        out = layer.apply({**values, "edits": changes}, X)
        return (out * OTHER).sum(), out

    grads, out = jax.grad(loss, has_aux=True)(changes)
    return out, grads


def along(edit: Any, step: Any) -> np.ndarray:
    """Return the products of a gradient and a direction."""
    leaves = zip(*map(jax.tree.leaves, (edit, step)), strict=True)
    return np.concatenate([(oracle.float64(x) * y).ravel() for x, y in leaves])


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("kind", LAYERS)
def test_an_edited_layer_is_the_layer_changed_by_hand(kind: str) -> None:
    """Each edit with neutral edits of the other tensors, and all edits together."""
    layer = LAYERS[kind]
    values = variables(layer, X)
    params, run = values["params"], jax.jit(lambda changes: with_edits(layer, values, changes))
    edited = {name: some_edit(name) for name in POINTS}
    neutral = {name: Edit(np.ones(shape), np.zeros(shape)) for name, shape in SHAPES.items()}
    assert edits.attach(layer, values, named(edited), X)["edits"] == named(edited)
    for chosen in (*((name,) for name in POINTS), POINTS):
        changes = neutral | {name: edited[name] for name in chosen}
        out, grads = run(named(changes))
        assert oracle.error(out, expected(params, X, changes, kind)) < 3e-6, chosen
        if len(chosen) > 1:
            continue
        (name,) = chosen
        # Numerical derivatives in float64 of the layer changed by hand, in a random direction.
        step = Edit(RNG.normal(size=SHAPES[name]), RNG.normal(size=SHAPES[name]))
        ahead, behind = (
            jax.tree.map(lambda e, s, h=h: np.float64(e) + h * s, changes[name], step)
            for h in (1e-5, -1e-5)
        )
        ahead, behind = (
            (expected(params, X, changes | {name: moved}, kind) * OTHER).sum()
            for moved in (ahead, behind)
        )
        parts = along(grads[f"attention_{name}"], step)
        assert np.isfinite(parts).all(), name
        assert abs(parts.sum() - (ahead - behind) / 2e-5) < 1e-5 * np.abs(parts).sum(), name


def test_a_function_follows_keep_and_add() -> None:
    """At all points except scores, and for some heads of the weights."""
    layer = LAYERS["grouped"]
    values = variables(layer, X)
    changes = {name: some_edit(name).replace(fn=clamp) for name in POINTS if name != "scores"}
    attached = edits.attach(layer, values, named(changes), X)
    out = jax.jit(layer.apply)(attached, X)
    assert oracle.error(out, expected(values["params"], X, changes, "grouped")) < 3e-6
    heads = {"attention_weights": Edit(heads=(2,), fn=clamp)}
    weights, plain = jax.jit(
        lambda: [
            layer.apply(v, X, return_weights=True)[1]
            for v in (edits.attach(layer, values, heads, X), values)
        ]
    )()
    wanted = np.array(plain)
    wanted[:, 2] = np.minimum(wanted[:, 2], 0.3)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5, atol=1e-6)


def test_arguments_of_a_function_have_gradients() -> None:
    """And a neutral edit changes no bit."""
    layer = LAYERS["rotary"]
    values = variables(layer, X)
    matrix = RNG.normal(size=(D, D)).astype(np.float32)
    neutral = named({name: Edit() for name in ("q", "k", "v", "z", "out")})

    @jax.jit
    def run(matrix: jax.Array) -> Any:
        changes = {"attention_out": Edit(fn=jnp.matmul, args=(matrix,))}
        value, grad = jax.value_and_grad(
            lambda e: (layer.apply({**values, "edits": e}, X) * OTHER).sum()
        )(changes)
        return value, grad["attention_out"].args[0]

    plain = jax.jit(layer.apply)(values, X)
    np.testing.assert_array_equal(jax.jit(layer.apply)({**values, "edits": neutral}, X), plain)
    value, grad = run(matrix)
    np.testing.assert_allclose(value, (plain @ matrix * OTHER).sum(), rtol=1e-4)
    np.testing.assert_allclose(grad, np.einsum("btd,bte->de", plain, OTHER), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(0.12)
def test_nnx_gives_the_outputs_and_gradients_of_linen() -> None:
    layer = LAYERS["rotary"]
    values = variables(layer, X)
    changes = named({name: some_edit(name) for name in ("q", "scores", "z")})
    changes["attention_out"] = Edit(add=RNG.normal(size=D), fn=clamp)
    twin = flax_mha.nnx.MultiHeadAttention(
        N, D, num_kv_heads=K, rotary=layer.rotary, sinks=True, mask=layer.mask, rngs=nnx.Rngs(0)
    )
    for path, x in flatten_dict(values["params"]).items():
        owner = functools.reduce(getattr, path, twin)
        owner.set_value(jnp.asarray(x))
    attached = edits.attach(layer, values, changes, X)["edits"]
    assert edits.attach(twin, changes, X) is twin
    out, grads = jax.jit(lambda changes: with_edits(layer, values, changes))(attached)
    call = nnx.jit(lambda m: m(X))
    np.testing.assert_allclose(call(twin), out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(call(nnx.merge(*nnx.split(twin))), out, rtol=1e-5, atol=1e-6)
    wrt = nnx.DiffState(0, edits.Edits)
    found = nnx.jit(nnx.grad(lambda m: (m(X) * OTHER).sum(), argnums=wrt))(twin)
    found = nnx.to_pure_dict(found)["edits"]
    for name, want in grads.items():
        for part in ("keep", "add"):
            got = found[name][part]
            np.testing.assert_allclose(got, getattr(want, part), rtol=1e-5, atol=1e-6)
    edits.detach(twin)
    np.testing.assert_allclose(call(twin), jax.jit(layer.apply)(values, X), rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(0.12)
def test_keep_0_removes_nan() -> None:
    layer = LAYERS["grouped"]
    values = variables(layer, X)
    bad = X.copy()
    bad[0, 0] = np.nan
    # Value and key of the first token would reach all others.
    zero = np.ones((T, 1, 1))
    zero[0] = 0
    attached = edits.attach(layer, values, named({name: Edit(zero) for name in "qkv"}), X)
    run = jax.jit(lambda x: (layer.apply(attached, x), layer.apply(values, x)))
    (out, plain), (same, _) = run(bad), run(X)
    np.testing.assert_array_equal(out, same)
    assert np.isnan(plain).any()


@pytest.mark.sampled(0.12)
def test_an_edit_of_bfloat16_keeps_gradients_in_float32() -> None:
    layer = LAYERS["grouped"].clone(dtype=jnp.bfloat16)
    values = variables(layer, X)

    def loss(add: jax.Array) -> jax.Array:
        edit = named({"z": Edit(add=add)})
        return layer.apply({**values, "edits": edit}, X).astype(jnp.float32).sum()

    grad = jax.jit(jax.grad(loss))(np.zeros((N, H), np.float32))
    assert grad.dtype == jnp.float32
    assert np.abs(grad).min() > 0


WRONG: dict[str, tuple[Any, str]] = {
    "attention_zz": (Edit(), r"must be of tensors of the model, got 'attention_zz'; give"),
    "layer/attention_z": (Edit(), "got .*'layer/attention_z'"),
    "attention_z": (Edit(np.ones(3)), r"`keep` of the edit attention_z must broadcast"),
    "attention_out": (Edit(add=np.ones((3, B, T, D))), "`add` of the edit"),
    "attention_k": (Edit(0, heads=(1,)), "heads of an edit must be None but for"),
    "attention_weights": (Edit(np.ones((3, 1, 1)), heads=(1, 2)), "must broadcast"),
    "attention_scores": (Edit(fn=clamp), r"piece by piece.*scores=\(scores\.Score\("),
    "attention_q": (Edit(fn=lambda x: x[0]), "`fn` of the edit .*attention_q must return re"),
    "attention_v": (Edit(fn=lambda x: x > 0), "real numbers .* got bool"),
    "attention_result": (3.0, "the edit of attention_result must be an Edit, or under"),
}


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_edit_is_an_error(path: str) -> None:
    edit, message = WRONG[path]
    layer = LAYERS["grouped"]
    twin = flax_mha.nnx.MultiHeadAttention(N, D, num_kv_heads=K, rngs=nnx.Rngs(0))
    for model, first in ((layer, (variables(layer, X),)), (twin, ())):
        with pytest.raises((TypeError, ValueError), match=message):
            edits.attach(model, *first, {path: edit}, X)
    assert twin.edits is None


def test_edits_that_a_call_cannot_use_are_an_error() -> None:
    layer = LAYERS["grouped"]
    values = variables(layer, X)

    def call(layer: nn.Module, changes: Any, **more: Any) -> None:
        jax.eval_shape(lambda: layer.apply({**values, "edits": changes}, X, **more))

    with pytest.raises(ValueError, match=r"edits must be of tensors that the call .*attention_y"):
        call(layer, {"attention_y": Edit()})
    with pytest.raises(ValueError, match=r"heads must be in \[-4, 4\)"):
        call(layer, {"attention_weights": Edit(heads=(9,))})
    dropout = layer.clone(dropout_rate=0.5, deterministic=False)
    with pytest.raises(ValueError, match="needs a call without dropout"):
        call(dropout, {"attention_weights": Edit(0)}, rngs={"dropout": jax.random.key(0)})
    # A variant computes no weights of its own.
    differential = flax_mha.variants.DifferentialAttention(N)
    with pytest.raises(ValueError, match=r"tensors of the model, got .*attention_weights"):
        edits.attach(differential, variables(differential, X), {"attention_weights": Edit(0)}, X)


def test_the_page_lists_all_tensors_that_edits_change() -> None:
    page = Path(__file__).parents[2] / "docs" / "look-inside.md"
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+) \|.*\| \[\\\*B, (.*?)\] \|", page.read_text(), re.M)
    listed = {name: shape for names, shape in rows for name in re.findall(r"\w+", names)}
    prefix = {"layer": "attention_", "softmax": "attention_"}
    assert listed == {
        prefix.get(x.module, "") + name: x.shape for name, x in TENSORS.items() if x.editable
    }


def test_reading_costs_nothing_unless_asked() -> None:
    layer = LAYERS["grouped"]
    values = variables(layer, X)
    watched = layer.clone(capture=Capture(("q", "z", "result", "scores")))
    program, wanted = (jax.jit(m.apply).lower(values, X).as_text() for m in (watched, layer))
    assert program == wanted


@pytest.mark.sampled(0.08)
def test_no_square_buffer_for_tensors_of_tokens() -> None:
    layer = MultiHeadAttention(8, kernel="blockwise", mask=masks.Causal())
    x = jax.ShapeDtypeStruct((1, 4096, 64), np.float32)
    values = variables(layer, x)
    changes = {name: Edit(keep=np.ones(8)[:, None]) for name in ("q", "k", "v", "z")}
    changes["scores"] = Edit(keep=np.ones((8, 1, 1)))

    def memory(chosen: Any) -> float:
        run = jax.jit(jax.grad(lambda v, x: layer.apply(v, x).sum()))
        edited = {**values, "edits": named(chosen)}
        return run.lower(edited, x).compile().memory_analysis().temp_size_in_bytes / 2**20

    assert memory(changes) < memory({}) + 40
