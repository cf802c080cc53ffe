"""Edits and captures in models: in variants, blocks, scans, kernels, and on meshes."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict

import flax_mha.nnx
from flax_mha import (
    Capture,
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
    edits,
    masks,
    positions,
    sharding,
    variants,
)  # fmt: skip
from flax_mha.edits import Edit
from tests.layer.test_edits import LAYERS, B, D, H, N, T, X, variables
from tests.support import oracle
from tests.support.meshes import on

RNG = np.random.default_rng(0)
ROTARY = positions.Rotary()
FIELDS: dict[str, Any] = {"mask": masks.Causal()}
LAYER = MultiHeadAttention(N, num_kv_heads=2, rotary=ROTARY, **FIELDS)
VARIANTS = {
    "latent": variants.MultiHeadLatentAttention(
        N, kv_rank=8, rope_dim=4, head_dim=4, rotary=ROTARY, **FIELDS
    ),
    "differential": variants.DifferentialAttention(N, head_dim=4, **FIELDS),
    "forgetting": variants.ForgettingAttention(N),
    "talking": variants.TalkingHeadsAttention(N, **FIELDS),
    "chosen": variants.ChosenBlocksAttention(N, block=2, count=2),
}


def without_head(head: int) -> np.ndarray:
    return (np.arange(N) != head).astype(np.float32)


def head_edit(head: int) -> Edit:
    return Edit(keep=without_head(head)[:, None])


def read(layer: nn.Module, values: Any, *inputs: Any, **call: Any) -> tuple[Any, dict[str, Any]]:
    """Return the output, and the values that were sown by path."""
    apply = functools.partial(layer.apply, **call, mutable="intermediates")
    out, sown = jax.jit(apply)(values, *inputs)
    return out, edits.values(sown)


def test_keys_of_another_layer_are_edited_for_this_layer_alone() -> None:
    values = variables(LAYER, X)
    edit = Edit(RNG.normal(size=(2, 4)), RNG.normal(size=(2, 1)))
    attached = {**values, "edits": {"attention_k": edit, "attention_v": edit}}

    @jax.jit
    def run() -> Any:
        _, kv = LAYER.apply(values, X, return_kv=True)
        want = LAYER.apply(values, X, kv=(edit(kv.key), edit(kv.value)))
        return LAYER.apply(attached, X, kv=kv), want

    np.testing.assert_allclose(*run(), rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_points_whose_heads_can_be_removed(name: str) -> None:
    names = ("q", "k", "v", "z", "out")
    layer = VARIANTS[name]
    values = variables(layer, X)
    changes = {f"attention_{point}": Edit() for point in names}
    assert {*changes} <= {*edits.names(layer, values, X)}
    # Numbers, so that one program runs the edits and the plain layer.
    changes["attention_z"] = Edit(keep=np.ones((N, 1), np.float32))
    reading = layer.clone(capture=Capture(("result",)))

    @jax.jit
    def run(changes: Any, head_mask: Any) -> Any:
        edited = layer.apply({**values, "edits": changes}, X)
        masked = layer.apply(values, X, head_mask=head_mask)
        _, sown = reading.apply(values, X, mutable="intermediates")
        return edited, masked, sown["intermediates"]["attention_result"][0]

    attached = edits.attach(layer, values, changes, X)["edits"]
    edited, want, shares = run(attached, np.ones(N, np.float32))
    np.testing.assert_array_equal(edited, want)
    edited, masked, _ = run({**attached, "attention_z": head_edit(2)}, without_head(2))
    np.testing.assert_allclose(edited, masked, rtol=1e-5, atol=1e-5)
    assert np.abs(masked - want).max() > 1e-3
    assert shares.shape == (B, T, N, D)
    total = np.asarray(shares).sum(-2) + values["params"]["out"]["bias"]
    np.testing.assert_allclose(total, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_edits_on_a_mesh_have_the_values_and_gradients_of_one_device(kind: str) -> None:
    layer = MultiHeadAttention(8, num_kv_heads=4, mask=masks.Causal())
    model = Encoder(1, EncoderBlock(layer, 32))
    x = np.tile(X, (2, 1, 2))
    values = variables(model, x)
    block = "layers_0/attention/attention_"
    changes = {
        block + "q": Edit(RNG.normal(size=(8, 1))), block + "k": Edit(RNG.normal(size=(4, 4))),
        block + "scores": Edit(RNG.normal(size=(8, 1, 1)), RNG.normal(size=(1, T, T))),
        block + "weights": Edit(RNG.normal(size=(2, T, T)), heads=(3, 6)),
        block + "z": Edit(add=RNG.normal(size=(4, T, 8, 4))),
        block + "result": Edit(RNG.normal(size=(8, 1))), block + "out": Edit(add=np.ones(32)),
        "layers_0/resid_mid": Edit(0.5), "layers_0/mlp/mlp_pre": Edit(RNG.normal(size=32)),
    }  # fmt: skip
    stored = edits.attach(model, values, changes, x)

    def loss(changed: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(model.apply({**values, "edits": changed}, x)))

    want = jax.jit(jax.value_and_grad(loss))(stored["edits"], x)
    with on(kind) as mesh:
        placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        values = jax.device_put(values, sharding.of(model.init, jax.random.key(0), x))
        got = jax.jit(jax.value_and_grad(loss))(stored["edits"], placed)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("edited", [False, True])
def test_capture_reads_chosen_heads_and_queries(edited: bool) -> None:
    """Also if weights are edited."""
    names = ("q", "k", "v", "z", "result", "out", "scores", "weights", "lse")
    names = ("scores", "weights", "lse", "entropy") if edited else names
    values = variables(LAYER, X)
    _, whole = read(LAYER.clone(capture=Capture(names)), values, X)
    if edited:
        values = {**values, "edits": {"attention_weights": Edit(2.0, heads=(3, 0))}}
    layer = LAYER.clone(capture=Capture(names, heads=(3, 1), queries=(0, 5)))
    _, part = read(layer, values, X)
    for name in names:
        want = np.asarray(whole[f"attention_{name}"])
        if name in ("k", "v"):
            want = want[:, :, [1, 0]]
        elif name == "out":
            want = want[:, [0, 5]]
        elif name in ("scores", "weights", "lse", "entropy"):
            want = want[:, [3, 1]][:, :, [0, 5]]
        else:
            want = want[:, [0, 5]][:, :, [3, 1]]
        if name == "weights" and edited:
            want = want * np.array([2, 1])[:, None, None]
        np.testing.assert_allclose(
            part[f"attention_{name}"], want, rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("normalizer", ["sigmoid", "softpick"])
def test_scores_and_weights_without_a_softmax(normalizer: str) -> None:
    """Scores are read. Half of the weights give half of the heads' outputs."""
    layer = LAYER.clone(normalizer=normalizer, capture=Capture(("scores",)))
    values = variables(layer, X)

    @jax.jit
    def run() -> Any:
        sown = [
            m.apply(values, X, mutable="intermediates")[1]["intermediates"]["attention_scores"][0]
            for m in (layer, layer.clone(normalizer="softmax"))
        ]
        half = [
            layer.apply({**values, "edits": {f"attention_{name}": Edit(keep=0.5)}}, X)
            for name in ("weights", "z")
        ]
        return sown, half, layer.apply(values, X)

    sown, (of_weights, of_z), plain = run()
    np.testing.assert_array_equal(*sown)
    assert oracle.error(of_weights, of_z) < 1e-6
    assert oracle.error(of_z, plain) > 1e-3


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("kernel", ["blockwise", "checkpointed"])
def test_scores_are_edited_inside_kernels(kernel: str) -> None:
    values = variables(LAYER, X)
    edit = Edit(RNG.normal(size=(N, 1, 1)), RNG.normal(size=(T, T)))

    def loss(edit: Edit, kernel: str) -> jax.Array:
        layer = LAYER.clone(kernel=kernel)
        return jnp.sin(layer.apply({**values, "edits": {"attention_scores": edit}}, X)).sum()

    both = (kernel, "reference")
    got, want = jax.jit(lambda edit: [jax.grad(loss)(edit, name) for name in both])(edit)
    np.testing.assert_allclose(got.keep, want.keep, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.add, want.add, rtol=1e-4, atol=1e-5)


BLOCK_POINTS = ("resid_pre", "resid_mid", "resid_post", "mlp_out")


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("scan", [False, True])
def test_blocks_have_their_points_under_remat_and_scan(scan: bool) -> None:
    """Names, values by path and of chosen tokens, and an edit of each point."""
    names = (*BLOCK_POINTS, "mlp_pre", "embed", "z")
    layer = LAYERS["grouped"].clone(capture=Capture(names))
    model = Encoder(2, EncoderBlock(layer, 32, remat=True), scan=scan)
    values = variables(model, X)
    known = edits.names(model, values, X)
    block, rows = ("layers/", (2,)) if scan else ("layers_1/", ())
    assert known[f"{block}mlp/mlp_pre"].shape == (*rows, B, T, 32)
    assert known[f"{block}attention/attention_z"].shape == (*rows, B, T, N, H)
    params = values["params"]

    def part(i: int) -> Any:
        if scan:
            return jax.tree.map(lambda x: x[i], params["layers"])
        return params[f"layers_{i}"]

    x = oracle.encoder_block(part(0), X, allowed=np.tril(np.ones((T, T), bool)))
    edit = Edit(RNG.normal(size=(T, 1)), RNG.normal(size=D))
    neutral = Edit(np.ones((T, 1)), np.zeros(D))
    run = jax.jit(functools.partial(model.apply, mutable="intermediates"))
    for name in BLOCK_POINTS:
        changes = {f"{block}{point}": edit if point == name else neutral for point in BLOCK_POINTS}
        changes = {path: {1: edit} for path, edit in changes.items()} if scan else changes
        out, sown = run(edits.attach(model, values, changes, X), X)
        want = _block_by_hand(part(1), x, name, edit)
        assert oracle.error(out, oracle.layer_norm(params["norm"], want)) < 5e-6, name
    found = edits.values(sown)
    assert {path: x.shape for path, x in found.items()} == {
        path: x.shape for path, x in known.items() if path.rsplit("/", 1)[-1].removeprefix(
            "attention_") in names
    }  # fmt: skip
    tree = sown["intermediates"]["layers" if scan else "layers_1"]
    assert found[f"{block}attention/attention_z"] is tree["attention"]["attention_z"][0]
    # Also where JAX keeps the trace of an earlier call.
    assert edits.names(model, values, X) == known
    few = layer.clone(capture=Capture(names[:3], queries=(5, 0)))
    few = Encoder(2, EncoderBlock(few, 32, remat=True), scan=scan)
    _, some = read(few, values, X)
    _, whole = read(model, values, X)
    for path, x in some.items():
        np.testing.assert_array_equal(x, whole[path][..., [5, 0], :])


def _block_by_hand(params: Any, x: np.ndarray, name: str, edit: Edit) -> np.ndarray:
    def change(point: str, y: np.ndarray) -> np.ndarray:
        return oracle.float64(edit.keep) * y + oracle.float64(edit.add) if point == name else y

    x = change("resid_pre", oracle.float64(x))
    y = oracle.layer_norm(params["attention_norm"], x)
    allowed = np.tril(np.ones((T, T), bool))
    x = change("resid_mid", x + oracle.multi_head(params["attention"], y, allowed=allowed)[0])
    y = oracle.mlp(params["mlp"], oracle.layer_norm(params["mlp_norm"], x))
    return change("resid_post", x + change("mlp_out", y))


def test_values_of_nnx_and_of_repeated_calls() -> None:
    class Twice(nnx.Module):
        def __init__(self) -> None:
            capture = Capture(("z",))
            self.layers = nnx.List(
                flax_mha.nnx.MultiHeadAttention(N, D, capture=capture, rngs=nnx.Rngs(n))
                for n in range(2)
            )

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layers[0](self.layers[0](self.layers[1](x)))

    _, sown = nnx.jit(nnx.capture(lambda model: model(X), nnx.Intermediate))(Twice())
    found = edits.values(sown)
    assert found["layers/1/attention_z"].shape == (B, T, N, H)
    assert [x.shape for x in found["layers/0/attention_z"]] == [(B, T, N, H)] * 2


class Stranger(nn.Module):
    """A user's model, whose scan passes only parameters by default."""

    capture: Capture | None = None
    sow_weights: bool = False
    passes: tuple[str, ...] = ("params",)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def step(layer: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + layer(x, sow_weights=self.sow_weights), None

        axes = dict.fromkeys(self.passes, 0)
        scanned = nn.scan(step, variable_axes=axes, split_rngs={"params": True}, length=3)
        layer = MultiHeadAttention(N, name="attention", capture=self.capture)
        return scanned(layer, x, None)[0]


@pytest.mark.parametrize("asked", [{"capture": Capture(("z",))}, {"sow_weights": True}])
def test_a_capture_that_a_scan_drops_is_a_warning(asked: dict[str, Any]) -> None:
    def sown(model: nn.Module, mutable: Any) -> Any:
        return jax.eval_shape(lambda v: model.apply(v, X, mutable=mutable)[1], values)

    values = jax.eval_shape(Stranger(**asked).init, jax.random.key(0), X)
    with pytest.warns(UserWarning, match="capture of attention is lost.* give nn.scan"):
        assert not sown(Stranger(**asked), "intermediates")
    # Not wanted, or not lost.
    assert not sown(Stranger(), "intermediates")
    assert not sown(Stranger(**asked), "cache")
    assert sown(Stranger(**asked, passes=("params", "intermediates")), "intermediates")


def at_most(x: jax.Array, most: jax.Array) -> jax.Array:
    return jnp.minimum(x, most)


def test_layers_under_scan_have_their_own_edits_and_one_function() -> None:
    """Edits that a scan drops are refused."""
    values = variables(Stranger(), X)
    path = "attention/attention_z"
    changes = {path: {2: Edit(keep=without_head(1)[:, None])}}
    with pytest.raises(ValueError, match=r"must pass edits to .*attention_z.*nn\.scan"):
        edits.attach(Stranger(), values, changes, X)
    model = Stranger(passes=("params", "edits"))
    for each in ({1: Edit(fn=at_most, args=(1.0,))}, {i: Edit(fn=lambda x: x) for i in range(3)}):
        with pytest.raises(ValueError, match="and one fn for all layers, got"):
            edits.attach(model, values, {path: each}, X)
    cuts = {i: Edit(fn=at_most, args=(np.float32(0.1 * i),)) for i in range(3)}
    out, cut = (
        jax.jit(model.apply)(edits.attach(model, values, changes, X), X)
        for changes in (changes, {path: cuts})
    )
    x, y, layer = X, X, MultiHeadAttention(N)

    @jax.jit
    def step(params: Any, x: Any, y: Any, keep: Any, edit: Any) -> Any:
        x = x + layer.apply({"params": params}, x, head_mask=keep)
        return x, y + layer.apply({"params": params, "edits": {"attention_z": edit}}, y)

    for i in range(3):
        params = jax.tree.map(lambda p, i=i: p[i], values["params"]["attention"])
        x, y = step(params, x, y, without_head(1 if i == 2 else N), cuts[i])
    np.testing.assert_allclose(out, x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cut, y, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(0.12)
def test_a_sweep_is_a_loop() -> None:
    model = Encoder(2, EncoderBlock(LAYERS["grouped"], 32))
    values = variables(model, X)
    keep = 1 - np.eye(2 * N).reshape(2 * N, 2, N, 1)
    each = {f"layers_{i}/attention/attention_z": Edit(keep[:, i]) for i in range(2)}

    def run(changes: Any, values: Any) -> jax.Array:
        return model.apply({**values, "edits": unflatten_dict(changes, sep="/")}, X)

    swept = edits.sweep(run, each, values, batch_size=3)
    masked = jax.jit(lambda masks: model.apply(values, X, head_mask=[*masks]))
    for out, heads in zip(swept, keep[..., 0], strict=True):
        np.testing.assert_allclose(out, masked(heads.astype(np.float32)), atol=1e-5)
