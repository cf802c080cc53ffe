"""Edits while decoding, over meshes, in variants, and through the transformations of nnx."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha
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
from tests.support import oracle
from tests.support.decoding import cache_of
from tests.support.meshes import on

B, T, D, N = 2, 8, 16, 4
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(B, T, D)), jnp.float32)
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


def random_variables(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    init = functools.partial(module.init, **options)
    return oracle.random_like(jax.eval_shape(init, jax.random.key(0), *inputs))


def head_edit(head: int) -> Edit:
    return Edit(keep=jnp.ones((N, 1)).at[head].set(0))


@pytest.mark.slow
def test_steps_with_edits_are_the_whole_sequence_with_them() -> None:
    values = random_variables(LAYER, X)
    changes = {
        "attention_k": Edit(RNG.normal(size=(2, 4))), "attention_z": head_edit(1),
        "attention_scores": Edit(RNG.normal(size=(N, 1, 1))),
        "attention_weights": Edit(2.0, heads=(2,)), "attention_out": Edit(add=np.ones(D)),
    }  # fmt: skip
    want = jax.jit(LAYER.apply)(edits.attach(LAYER, values, changes, X), X)
    cached = LAYER.clone(decode=True)
    cache, outs = cache_of(cached, X), []
    step = jax.jit(functools.partial(cached.apply, mutable="cache"))
    for start, stop in ((0, 6), (6, 7), (7, 8)):
        out, new = step({**values, "edits": changes, "cache": cache}, X[:, start:stop])
        cache = new["cache"]
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), want, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_an_edit_with_an_axis_of_tokens_is_for_calls_of_as_many() -> None:
    cached, values = LAYER.clone(decode=True), random_variables(LAYER, X)
    changes = {"attention_z": Edit(add=RNG.normal(size=(T, 1, 1)))}
    attached = {**values, "edits": changes, "cache": cache_of(cached, X)}
    cached.apply(attached, X, mutable="cache")
    with pytest.raises(ValueError, match="`add` of the edit attention_z must broadcast"):
        cached.apply(attached, X[:, :1], mutable="cache")


@pytest.mark.sampled(0.13, slow=0.2)
def test_keys_of_another_layer_are_edited_for_this_layer_alone() -> None:
    values = random_variables(LAYER, X)
    _, kv = LAYER.apply(values, X, return_kv=True)
    edit = Edit(RNG.normal(size=(2, 4)), RNG.normal(size=(2, 1)))
    attached = {**values, "edits": {"attention_k": edit, "attention_v": edit}}
    given = LAYER.apply(attached, X, kv=kv)
    want = LAYER.apply(values, X, kv=(edit(kv.key), edit(kv.value)))
    np.testing.assert_allclose(given, want, rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_points_whose_heads_can_be_removed(name: str) -> None:
    layer = VARIANTS[name].clone(capture=Capture(("q", "k", "v", "z", "out", "result")))
    values = random_variables(layer, X)
    apply = jax.jit(layer.apply)
    neutral = {point: Edit() for point in edits.names(layer, values, X) if point[-1] in "qkvzt"
               and not point.endswith("result")}  # fmt: skip
    assert {f"attention_{point}" for point in ("q", "k", "v", "z", "out")} <= {*neutral}
    want = apply(values, X)
    np.testing.assert_array_equal(apply(edits.attach(layer, values, neutral, X), X), want)
    attached = edits.attach(layer, values, {"attention_z": head_edit(2)}, X)
    masked = layer.apply(values, X, head_mask=jnp.ones(N).at[2].set(0))
    np.testing.assert_allclose(apply(attached, X), masked, rtol=1e-5, atol=1e-5)
    assert np.abs(masked - want).max() > 1e-3
    _, sown = layer.apply(values, X, mutable="intermediates")
    shares = sown["intermediates"]["attention_result"][0]
    assert shares.shape == (B, T, N, D)
    total = np.asarray(shares).sum(-2) + values["params"]["out"]["bias"]
    np.testing.assert_allclose(total, want, rtol=1e-4, atol=1e-4)


def test_weights_of_a_variant_with_its_own_attention_are_no_point() -> None:
    layer = VARIANTS["differential"]
    values = random_variables(layer, X)
    assert "attention_weights" not in edits.names(layer, values, X)
    with pytest.raises(ValueError, match=r"tensors of the model, got .*attention_weights"):
        edits.attach(layer, values, {"attention_weights": Edit(keep=0)}, X)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_edits_on_a_mesh_have_the_values_and_gradients_of_one_device(kind: str) -> None:
    layer = MultiHeadAttention(8, num_kv_heads=4, mask=masks.Causal())
    model = Encoder(1, EncoderBlock(layer, 32))
    x = jnp.tile(X, (2, 1, 2))
    values = random_variables(model, x)
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
    mesh, leave = on(kind)
    try:
        placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        values = jax.device_put(values, sharding.of(model.init, jax.random.key(0), x))
        got = jax.jit(jax.value_and_grad(loss))(stored["edits"], placed)
    finally:
        leave()
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


@pytest.mark.sampled(0.13, slow=0.2)
def test_edits_work_in_nnx_vmap_scan_and_to_nnx() -> None:
    def make(seed: Any) -> nnx.Module:
        return flax_mha.nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(seed))

    layer = edits.attach(make(0), {"attention_z": head_edit(1)}, X)
    want = layer(X)
    each = nnx.vmap(lambda m, x: m(x[None])[0], in_axes=(None, 0))(layer, X)
    np.testing.assert_allclose(each, want, rtol=1e-5, atol=1e-5)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def step(m: Any, x: jax.Array) -> Any:
        return m, m(x[None])[0]

    np.testing.assert_allclose(step(layer, X)[1], want, rtol=1e-5, atol=1e-5)
    linen = MultiHeadAttention(N)
    bridged = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(X)
    nnx.register_variable_name("edits", edits.Edits, overwrite=True)
    bridged.attention_z = edits.Edits(head_edit(1))
    plain = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(X)
    masked = plain(X, head_mask=jnp.ones(N).at[1].set(0))
    np.testing.assert_allclose(bridged(X), masked, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(0.13, slow=0.2)
def test_capture_reads_chosen_heads_and_queries() -> None:
    names = ("q", "k", "v", "z", "result", "out", "scores", "weights", "lse")
    whole = LAYER.clone(capture=Capture(names))
    some = LAYER.clone(capture=Capture(names, heads=(3, 1), queries=(0, 6)))
    values = random_variables(LAYER, X)
    _, one = whole.apply(values, X, mutable="intermediates")
    _, two = some.apply(values, X, mutable="intermediates")
    for name in names:
        all_, part = (s["intermediates"][f"attention_{name}"][0] for s in (one, two))
        if name in ("k", "v"):
            want = all_[:, :, [1, 0]]
        elif name == "out":
            want = all_[:, [0, 6]]
        elif name in ("scores", "weights", "lse"):
            want = all_[:, [3, 1]][:, :, [0, 6]]
        else:
            want = all_[:, [0, 6]][:, :, [3, 1]]
        np.testing.assert_allclose(part, want, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.sampled(0.13, slow=0.2)
def test_blocks_read_chosen_tokens() -> None:
    names = ("embed", "resid_post", "mlp_pre", "mlp_out")
    one, two = (
        Encoder(1, EncoderBlock(LAYER.clone(capture=Capture(names, queries=queries)), 32))
        for queries in (None, (5, 0))
    )
    values = random_variables(one, X)
    whole, part = (m.apply(values, X, mutable="intermediates")[1] for m in (one, two))
    assert len(jax.tree.leaves(part)) == len(names)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:, [5, 0]], y), whole, part)


@pytest.mark.sampled(0.13, slow=0.2)
def test_values_read_beside_edited_weights_are_of_the_chosen_heads() -> None:
    names = ("weights", "scores", "lse", "entropy")
    values = random_variables(LAYER, X)
    attached = {**values, "edits": {"attention_weights": Edit(2.0, heads=(3, 0))}}
    some = LAYER.clone(capture=Capture(names, heads=(3, 1, 0), queries=(5, 2)))
    read, plain = (
        some.apply(v, X, mutable="intermediates")[1]["intermediates"] for v in (attached, values)
    )
    for name in names:
        got, want = (np.asarray(x[f"attention_{name}"][0]) for x in (read, plain))
        if name == "weights":
            want = want * np.array([2, 1, 2])[:, None, None]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.sampled(0.13, slow=0.2)
def test_names_are_the_same_when_asked_again() -> None:
    """Also where JAX keeps the trace of an earlier call."""
    layer = LAYER.clone(capture=Capture(("z",)))
    for scan in (False, True):
        model = Encoder(2, EncoderBlock(layer, 32, remat=True), scan=scan)
        values = random_variables(model, X)
        jax.jit(model.apply)(values, X)
        first = edits.names(model, values, X)
        assert len(first) > 10
        assert edits.names(model, values, X) == first


@pytest.mark.parametrize("normalizer", ["sigmoid", "softpick"])
def test_scores_are_read_without_a_softmax(normalizer: str) -> None:
    layer = LAYER.clone(normalizer=normalizer, capture=Capture(("scores",)))
    values = random_variables(layer, X)
    _, sown = layer.apply(values, X, mutable="intermediates")
    _, expected = layer.clone(normalizer="softmax").apply(values, X, mutable="intermediates")
    np.testing.assert_array_equal(
        *(s["intermediates"]["attention_scores"][0] for s in (sown, expected))
    )


@pytest.mark.parametrize("normalizer", ["sigmoid", "softpick"])
def test_weights_are_edited_without_a_softmax(normalizer: str) -> None:
    """Half of the weights give half of the heads' outputs."""
    layer, half = LAYER.clone(normalizer=normalizer), Edit(keep=0.5)
    values = random_variables(layer, X)
    of_weights, of_z = (
        layer.apply({**values, "edits": {f"attention_{name}": half}}, X)
        for name in ("weights", "z")
    )
    assert oracle.error(of_weights, of_z) < 1e-6
    assert oracle.error(of_z, layer.apply(values, X)) > 1e-3


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("kernel", ["blockwise", "checkpointed"])
def test_scores_are_edited_inside_kernels(kernel: str) -> None:
    values = random_variables(LAYER, X)
    edit = Edit(RNG.normal(size=(N, 1, 1)), RNG.normal(size=(T, T)))

    def loss(edit: Edit, kernel: str) -> jax.Array:
        layer = LAYER.clone(kernel=kernel)
        return jnp.sin(layer.apply({**values, "edits": {"attention_scores": edit}}, X)).sum()

    got, want = (jax.grad(loss)(edit, name) for name in (kernel, "reference"))
    np.testing.assert_allclose(got.keep, want.keep, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.add, want.add, rtol=1e-4, atol=1e-5)
