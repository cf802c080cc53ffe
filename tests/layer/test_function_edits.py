"""Edits by a function, values by path, and errors that name the nearest path."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import CacheConfig, Capture, Encoder, EncoderBlock, MultiHeadAttention, edits, masks
from flax_mha.analysis import prune
from flax_mha.edits import Edit
from tests.layer.test_edits import LAYERS, B, D, H, N, T, X, variables
from tests.support.decoding import cache_of

RNG = np.random.default_rng(0)
POINTS = ("q", "k", "v", "weights", "z", "result", "out")


def clamp(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -0.3, 0.3)


def top_2(x: jax.Array) -> jax.Array:
    """Keep the two largest features."""
    least = jax.lax.top_k(x, 2)[0][..., -1:]
    return jnp.where(x >= least, x, 0)


def splice(x: jax.Array, encoder: jax.Array, decoder: jax.Array) -> jax.Array:
    """Replace x by the output of a sparse autoencoder, and keep its error."""
    code = jax.nn.relu(jnp.einsum("...d,df->...f", x, encoder))
    out = jnp.einsum("...f,fd->...d", code, decoder)
    return out + jax.lax.stop_gradient(x - out) * 0.5


def at_point(name: str, change: Any) -> tuple[Any, Any, Any]:
    """Return a layer, its variables, and the output where change(tensor) is in its place."""
    layer = LAYERS["grouped"].clone(capture=Capture((name,)))
    given = variables(layer, X)
    _, sown = layer.apply(given, X, mutable="intermediates")
    x = sown["intermediates"][f"attention_{name}"][0]
    affine = edits.attach(layer, given, {f"attention_{name}": Edit(0, change(x))}, X)
    return layer, given, jax.jit(layer.apply)(affine, X)


@pytest.mark.sampled(0.12, slow=0.3)
@pytest.mark.parametrize("fn", [clamp, top_2], ids=["clamp", "top 2"])
@pytest.mark.parametrize("name", POINTS)
def test_a_function_changes_the_tensor(name: str, fn: Any) -> None:
    """Check against an affine edit to its result."""
    layer, given, wanted = at_point(name, fn)
    changed = edits.attach(layer, given, {f"attention_{name}": Edit(fn=fn)}, X)
    np.testing.assert_allclose(jax.jit(layer.apply)(changed, X), wanted, rtol=1e-5, atol=1e-6)
    assert not np.allclose(wanted, layer.apply(given, X), atol=1e-3)


@pytest.mark.sampled(0.13, slow=0.2)
def test_a_function_follows_keep_and_add() -> None:
    keep, add = (RNG.normal(size=s).astype("f") for s in ((N, H), H))
    layer, given, wanted = at_point("z", lambda x: clamp(keep * np.asarray(x) + add))
    changed = edits.attach(layer, given, {"attention_z": Edit(keep, add, fn=clamp)}, X)
    np.testing.assert_allclose(jax.jit(layer.apply)(changed, X), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(0.13, slow=0.2)
def test_weights_of_some_heads_change_by_a_function() -> None:
    layer, given, _ = at_point("weights", clamp)
    heads = {"attention_weights": Edit(heads=(2,), fn=clamp)}
    found = layer.apply(edits.attach(layer, given, heads, X), X, return_weights=True)[1]
    plain = layer.apply(given, X, return_weights=True)[1]
    wanted = np.array(plain)
    wanted[:, 2] = np.minimum(wanted[:, 2], 0.3)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_arguments_of_a_function_have_gradients() -> None:
    """A sparse autoencoder at the residual stream, trained in place, in linen and nnx."""
    model = Encoder(2, EncoderBlock(LAYERS["grouped"], 32))
    given = variables(model, X)
    encoder, decoder = (RNG.normal(size=s).astype("f") for s in ((D, 24), (24, D)))
    cotangent = RNG.normal(size=X.shape).astype("f")

    def loss(args: Any) -> jax.Array:
        changes = {"layers_0": {"resid_post": Edit(fn=splice, args=args)}}
        return jnp.vdot(model.apply({**given, "edits": changes}, X), cotangent)

    def by_hand(args: Any) -> jax.Array:
        block = model.block.apply({"params": given["params"]["layers_0"]}, X)
        x = splice(block, *args)
        x = model.block.apply({"params": given["params"]["layers_1"]}, x)
        x = nn.LayerNorm().apply({"params": given["params"]["norm"]}, x)
        return jnp.vdot(x, cotangent)

    found, wanted = (jax.jit(jax.value_and_grad(f))((encoder, decoder)) for f in (loss, by_hand))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    jax.tree.map(close, found, wanted)
    assert all(np.abs(x).max() > 0.1 for x in found[1])


def test_nnx_layers_take_functions() -> None:
    layer = flax_mha.nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(0))
    plain = layer(X)
    matrix = RNG.normal(size=(D, D)).astype("f")
    edits.attach(layer, {"attention_out": Edit(fn=jnp.matmul, args=(matrix,))}, X)
    np.testing.assert_allclose(layer(X), plain @ matrix, rtol=1e-5, atol=1e-5)
    out = nnx.jit(lambda layer, x: layer(x))(nnx.clone(layer), X)
    np.testing.assert_allclose(out, plain @ matrix, rtol=1e-5, atol=1e-5)
    edits.detach(layer)
    np.testing.assert_array_equal(layer(X), plain)


@pytest.mark.slow
def test_layers_under_scan_have_one_function_and_their_own_numbers() -> None:
    model = Encoder(2, EncoderBlock(LAYERS["grouped"], 32))
    scanned = model.clone(scan=True)
    given = variables(model, X)
    stacked = [given["params"][f"layers_{i}"] for i in range(2)]
    params = {"layers": jax.tree.map(lambda *x: jnp.stack(x), *stacked)}
    both = {"params": params | {"norm": given["params"]["norm"]}}

    def cut(x: jax.Array, most: jax.Array) -> jax.Array:
        return jnp.minimum(x, most)

    each = {i: Edit(fn=cut, args=(np.float32(0.1 * i),)) for i in range(2)}
    flat = {f"layers_{i}/attention/attention_z": edit for i, edit in each.items()}
    wanted = jax.jit(model.apply)(edits.attach(model, given, flat, X), X)
    attached = edits.attach(scanned, both, {"layers/attention/attention_z": each}, X)
    np.testing.assert_allclose(jax.jit(scanned.apply)(attached, X), wanted, rtol=1e-4, atol=1e-5)
    for some in ({1: Edit(fn=cut, args=(1.0,))}, {0: Edit(fn=clamp), 1: Edit(fn=top_2)}):
        with pytest.raises(ValueError, match="and one fn for all layers, got"):
            edits.attach(scanned, both, {"layers/attention/attention_z": some}, X)


@pytest.mark.parametrize(
    ("point", "edit", "error", "words"),
    [
        ("scores", Edit(fn=clamp), ValueError, r"piece by piece.*scores=\(scores\.Score\("),
        ("z", Edit(fn=lambda x: x[0]), ValueError, "`fn` of the edit .*attention_z must return re"),
        ("z", Edit(fn=lambda x: x > 0), ValueError, "real numbers .* got bool"),
        ("z", Edit(fn=lambda x: None), ValueError, "must return real numbers .* got None"),
    ],
)  # fmt: skip
def test_invalid_functions_raise(point: str, edit: Edit, error: Any, words: str) -> None:
    layer = LAYERS["grouped"]
    with pytest.raises(error, match=words):
        edits.attach(layer, variables(layer, X), {f"attention_{point}": edit}, X)


def test_weights_in_a_ring_buffer_refuse_functions() -> None:
    layer = MultiHeadAttention(N, mask=masks.Window(2, 0), decode=True, cache=CacheConfig(slots=5))
    given = variables(layer.clone(decode=False), X)
    changes = {"attention_weights": Edit(fn=clamp)}
    held = {**given, "edits": changes, "cache": cache_of(layer, X)}
    with pytest.raises(ValueError, match="no function in a ring buffer"):
        layer.apply(held, X[:, :1], mutable="cache")


@pytest.mark.sampled(0.13, slow=0.2)
def test_values_of_a_run_by_path() -> None:
    names = ("z", "weights", "resid_post")
    layer = LAYERS["grouped"].clone(capture=Capture(names))
    model = Encoder(2, EncoderBlock(layer, 32))
    given = variables(model, X)
    _, sown = model.apply(given, X, mutable="intermediates")
    found = edits.values(sown)
    known = edits.names(model, given, X)
    assert {path: x.shape for path, x in found.items()} == {
        path: x.shape for path, x in known.items() if path.endswith(names)
    }
    z = sown["intermediates"]["layers_1"]["attention"]["attention_z"][0]
    assert found["layers_1/attention/attention_z"] is z
    assert edits.values(sown["intermediates"]).keys() == found.keys()
    # A value is an edit, by the same path.
    path = "layers_0/attention/attention_z"
    patched = edits.attach(model, given, {path: Edit(0, found[path])}, X)
    np.testing.assert_allclose(model.apply(patched, X), model.apply(given, X), atol=1e-5)


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

    _, sown = nnx.capture(lambda model: model(X), nnx.Intermediate)(Twice())
    found = edits.values(sown)
    assert found["layers/1/attention_z"].shape == (B, T, N, H)
    assert [x.shape for x in found["layers/0/attention_z"]] == [(B, T, N, H)] * 2


MANY = Encoder(20, EncoderBlock(MultiHeadAttention(N), 8))


@pytest.mark.sampled(0.13, slow=0.2)
def test_wrong_paths_name_the_three_nearest() -> None:
    given = jax.eval_shape(MANY.init, jax.random.key(0), X)
    words = r"got 'layers_7/attn/attention_z'; give '.*\(of 2\d\d\)"
    with pytest.raises(ValueError, match=words) as e:
        edits.attach(MANY, given, {"layers_7/attn/attention_z": Edit(0)}, X)
    assert "'layers_7/attention/attention_z'" in str(e.value)
    assert len(str(e.value)) < 400
    with pytest.raises(ValueError, match="'layers_7/attention'") as e:
        prune(MANY, given, {"layers_7/atention": (1,)})
    assert len(str(e.value)) < 400
