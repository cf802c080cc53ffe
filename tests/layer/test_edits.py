"""Points of a layer and its block, read and edited, against the same model changed by hand."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

import flax_mha
from flax_mha import Capture, Encoder, EncoderBlock, MultiHeadAttention, edits, masks, positions
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
        keep, add = (oracle.float64(part) for part in (changes[name].keep, changes[name].add))
        return keep * y + add

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


def named(changes: Mapping[str, Edit]) -> dict[str, Edit]:
    return {f"attention_{name}": edit for name, edit in changes.items()}


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", [*POINTS, "all"])
def test_an_edited_layer_is_the_layer_changed_by_hand(name: str, kind: str) -> None:
    layer, chosen = LAYERS[kind], POINTS if name == "all" else (name,)
    values = variables(layer, X)
    changes = {point: some_edit(point) for point in chosen}
    attached = edits.attach(layer, values, named(changes), X)
    out = jax.jit(layer.apply)(attached, X)
    assert oracle.error(out, expected(values["params"], X, changes, kind)) < 3e-6


@pytest.mark.slow
def test_nnx_gives_the_outputs_and_gradients_of_linen() -> None:
    layer = LAYERS["rotary"]
    values = variables(layer, X)
    changes = named({name: some_edit(name) for name in ("q", "scores", "z", "out")})
    twin = flax_mha.nnx.MultiHeadAttention(
        N, D, num_kv_heads=K, rotary=layer.rotary, sinks=True, mask=layer.mask, rngs=nnx.Rngs(0)
    )
    for path, x in flatten_dict(values["params"]).items():
        owner = functools.reduce(getattr, path, twin)
        owner.set_value(jnp.asarray(x))
    attached = edits.attach(layer, values, changes, X)
    assert edits.attach(twin, changes, X) is twin
    np.testing.assert_array_equal(jax.jit(layer.apply)(attached, X), nnx.jit(lambda m: m(X))(twin))

    def loss(out: jax.Array) -> jax.Array:
        return (out * jnp.asarray(OTHER)).sum()

    chosen = attached["edits"]
    grads = jax.grad(lambda e: loss(layer.apply({**values, "edits": e}, X)))(chosen)
    wrt = nnx.DiffState(0, edits.Edits)
    found = nnx.to_pure_dict(nnx.grad(lambda m: loss(m(X)), argnums=wrt)(twin))["edits"]
    for name, want in grads.items():
        for part in ("keep", "add"):
            got = found[name][part]
            np.testing.assert_allclose(got, getattr(want, part), rtol=1e-5, atol=1e-6)
    definition, state = nnx.split(twin)
    np.testing.assert_array_equal(nnx.merge(definition, state)(X), twin(X))
    edits.detach(twin)
    np.testing.assert_allclose(twin(X), layer.apply(values, X), rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("name", [*POINTS])
def test_gradients_of_edits_are_those_of_the_tensor(name: str) -> None:
    layer = LAYERS["grouped"].clone(capture=Capture(POINTS))
    values = variables(layer, X)
    edit = some_edit(name)

    def loss(edit: Edit) -> jax.Array:
        return (layer.apply({**values, "edits": named({name: edit})}, X) * OTHER).sum()

    grad = jax.jit(jax.grad(loss))(edit)
    assert np.isfinite(grad.keep).all()
    # Numerical derivatives in float64 of the model changed by hand, in a random direction.
    step = Edit(RNG.normal(size=SHAPES[name]), RNG.normal(size=SHAPES[name]))

    def by_hand(h: float) -> float:
        moved = jax.tree.map(lambda e, s: np.float64(e) + h * s, edit, step)
        return float((expected(values["params"], X, {name: moved}, "grouped") * OTHER).sum())

    numeric = (by_hand(1e-5) - by_hand(-1e-5)) / 2e-5
    pairs = ((grad.keep, step.keep), (grad.add, step.add))
    along = sum(float((np.float64(g) * s).sum()) for g, s in pairs)
    assert abs(along - numeric) < 1e-4 * abs(numeric) + 1e-4


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("name", ["q", "k", "v", "z", "out"])
def test_a_neutral_edit_changes_no_bit(name: str) -> None:
    layer = LAYERS["rotary"]
    values = variables(layer, X)
    attached = edits.attach(layer, values, named({name: Edit()}), X)
    apply = jax.jit(layer.apply)
    np.testing.assert_array_equal(apply(attached, X), apply(values, X))


@pytest.mark.sampled(0.25, slow=0.2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_all_z_of_another_run_are_that_run(dtype: Any) -> None:
    layer = LAYERS["rotary"].clone(dtype=dtype, capture=Capture(("z",)))
    values = variables(layer, X)
    apply = jax.jit(functools.partial(layer.apply, mutable="intermediates"))
    out, sown = apply(values, OTHER)
    changes = {name: Edit(0, x[0]) for name, x in sown["intermediates"].items()}
    patched, _ = apply(edits.attach(layer, values, changes, X), X)
    np.testing.assert_array_equal(patched, out)


@pytest.mark.sampled(0.13, slow=0.2)
def test_keep_0_removes_nan() -> None:
    layer = LAYERS["grouped"]
    values = variables(layer, X)
    bad = X.copy()
    bad[0, 0] = np.nan
    # Value and key of the first token would reach all others.
    zero = np.ones((T, 1, 1))
    zero[0] = 0
    changes = named({name: Edit(zero) for name in "qkv"})
    out = layer.apply(edits.attach(layer, values, changes, bad), bad)
    same = layer.apply(edits.attach(layer, values, changes, X), X)
    np.testing.assert_array_equal(out, same)
    assert np.isnan(layer.apply(values, bad)).any()


@pytest.mark.sampled(0.13, slow=0.2)
def test_an_edit_of_bfloat16_keeps_gradients_in_float32() -> None:
    layer = LAYERS["grouped"].clone(dtype=jnp.bfloat16)
    values = variables(layer, X)

    def loss(add: jax.Array) -> jax.Array:
        edit = named({"z": Edit(add=add)})
        return layer.apply({**values, "edits": edit}, X).astype(jnp.float32).sum()

    grad = jax.grad(loss)(jnp.zeros((N, H), jnp.float32))
    assert grad.dtype == jnp.float32
    assert np.abs(grad).min() > 0


BLOCK_POINTS = ("resid_pre", "resid_mid", "resid_post", "mlp_out")


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("scan", [False, True])
def test_blocks_have_their_points_under_remat_and_scan(scan: bool) -> None:
    names = (*BLOCK_POINTS, "mlp_pre", "embed", "z")
    layer = LAYERS["grouped"].clone(capture=Capture(names))
    model = Encoder(2, EncoderBlock(layer, 32, remat=True), scan=scan)
    values = variables(model, X)
    known = edits.names(model, values, X)
    block = "layers/" if scan else "layers_1/"
    rows = (2,) if scan else ()
    assert known[f"{block}mlp/mlp_pre"].shape == (*rows, B, T, 32)
    assert known[f"{block}attention/attention_z"].shape == (*rows, B, T, N, H)
    assert known["embed"].shape == (B, T, D)
    params = values["params"]

    def part(i: int) -> Any:
        if scan:
            return jax.tree.map(lambda x: x[i], params["layers"])
        return params[f"layers_{i}"]

    edit = Edit(RNG.normal(size=(T, 1)), RNG.normal(size=D))
    for name in BLOCK_POINTS:
        at = {1: edit} if scan else edit
        attached = edits.attach(model, values, {f"{block}{name}": at}, X)
        out, sown = jax.jit(functools.partial(model.apply, mutable="intermediates"))(attached, X)
        x = oracle.encoder_block(part(0), X, allowed=np.tril(np.ones((T, T), bool)))
        want = _block_by_hand(part(1), x, name, edit)
        assert oracle.error(out, oracle.layer_norm(params["norm"], want)) < 5e-6, name
        read = flatten_dict(sown["intermediates"], sep="/")
        assert {path: x[0].shape for path, x in read.items()} == {
            path: x.shape for path, x in known.items() if path.rsplit("_", 1)[-1] in
            ("pre", "mid", "post", "out", "z", "embed") and not path.endswith("attention_out")
        }  # fmt: skip


def _block_by_hand(params: Any, x: np.ndarray, name: str, edit: Edit) -> np.ndarray:
    def change(point: str, y: np.ndarray) -> np.ndarray:
        return oracle.float64(edit.keep) * y + oracle.float64(edit.add) if point == name else y

    x = change("resid_pre", oracle.float64(x))
    y = oracle.layer_norm(params["attention_norm"], x)
    allowed = np.tril(np.ones((T, T), bool))
    x = change("resid_mid", x + oracle.multi_head(params["attention"], y, allowed=allowed)[0])
    y = oracle.mlp(params["mlp"], oracle.layer_norm(params["mlp_norm"], x))
    return change("resid_post", x + change("mlp_out", y))
