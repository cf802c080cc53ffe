"""Models written for Flax's layer work with ours after changing one import."""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, MultiHeadDotProductAttention, attention_fn
from tests.layer.test_flax_parity import GRADIENT, OUTPUT, lenient
from tests.support.oracle import error, random_like

KEY = jax.random.key(0, impl="unsafe_rbg")
SOURCE = np.array([[3, 4, 5, 0], [1, 2, 3, 4]])
TARGET = np.array([[3, 4, 5, 6, 0, 0], [1, 2, 3, 4, 5, 6]])
REAL = TARGET > 0


class Block(nn.Module):
    """A block of unnamed layers, as in Flax's examples."""

    layer: type[nn.Module]
    decode: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, memory: Any, mask: Any, memory_mask: Any) -> jax.Array:
        options = {"num_heads": 2, "use_bias": False, "dropout_rate": 0.1, "deterministic": True}
        y = nn.LayerNorm()(x)
        x = x + self.layer(**options, decode=self.decode)(y, mask=mask)
        if memory is not None:
            y = nn.LayerNorm()(x)
            x = x + self.layer(**options)(y, memory, mask=memory_mask)
        return x + nn.Dense(8)(nn.LayerNorm()(x))


class Model(nn.Module):
    """A translator like Flax's example `wmt`, with its masks."""

    layer: type[nn.Module]
    decode: bool = False
    lift: str = "none"

    def setup(self) -> None:
        self.embed = nn.Embed(9, 8)
        self.encoder = Block(self.layer)
        block = {"none": Block, "remat": nn.remat(Block), "scan": Block}[self.lift]
        if self.lift == "scan":
            block = nn.scan(
                lambda block, x, *rest: (block(x, *rest), None),
                variable_axes={"params": 0, "cache": 0}, split_rngs={"params": True},
                in_axes=nn.broadcast, length=2,
            )  # fmt: skip
            self.decoder = Block(self.layer, self.decode)
            self.run = lambda *args: block(self.decoder, *args)[0]
        else:
            self.decoder = self.run = block(self.layer, self.decode)

    def encode(self, source: jax.Array) -> jax.Array:
        mask = nn.make_attention_mask(source > 0, source > 0)
        return self.encoder(self.embed(source), None, mask, None)

    def step(self, memory: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        if self.decode:
            mask = None
            memory_mask = nn.make_attention_mask(jnp.ones_like(target) > 0, source > 0)
        else:
            mask = nn.combine_masks(
                nn.make_attention_mask(target > 0, target > 0), nn.make_causal_mask(target)
            )
            memory_mask = nn.make_attention_mask(target > 0, source > 0)
        return self.embed.attend(self.run(self.embed(target), memory, mask, memory_mask))

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        return self.step(self.encode(source), source, target)


def models(**fields: Any) -> tuple[Model, Model]:
    layers = (nn.MultiHeadDotProductAttention, MultiHeadDotProductAttention)
    return tuple(Model(layer, **fields) for layer in layers)


@pytest.mark.slow
@pytest.mark.parametrize("lift", ["remat", "scan"])
def test_initial_values_are_bitwise_equal(lift: str) -> None:
    """Flax names layers after their class and draws initial values by these names."""
    init = [lenient(jax.jit(model.init))(KEY, SOURCE, TARGET) for model in models(lift=lift)]
    flat = [jax.tree_util.tree_leaves_with_path(tree) for tree in init]
    assert "MultiHeadDotProductAttention_1" in init[1]["params"]["decoder"]
    for (path, value), (name, expected) in zip(*reversed(flat), strict=True):
        assert path == name
        np.testing.assert_array_equal(value, expected, err_msg=str(path))


@pytest.mark.sampled(0.13, slow=0.2)
def test_outputs_and_gradients_match_flax() -> None:
    """For real tokens: for fully masked queries Flax averages values and ours returns 0."""
    theirs, ours = models()
    params = random_like(jax.eval_shape(lenient(theirs.init), KEY, SOURCE, TARGET))

    def both(model: Model) -> Any:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = model.apply(params, SOURCE, TARGET)
            return jnp.where(REAL[..., None], jnp.sin(logits), 0).sum(), logits[REAL]

        return lenient(jax.jit(jax.grad(loss, has_aux=True)))(params)

    (grads, out), (expected_grads, expected) = both(ours), both(theirs)
    assert error(out, expected) < 2 * OUTPUT
    size = max(np.linalg.norm(g) for g in jax.tree.leaves(expected_grads))
    for grad, wanted in zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True):
        assert np.linalg.norm(grad - wanted) < 2 * GRADIENT * size


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("lift", ["scan"])
def test_cached_decoding_matches_flax(lift: str) -> None:
    """`init` at full length allocates the cache. Each call then decodes one token."""
    outs = []
    for model in models(decode=True, lift=lift):
        init = partial(lenient(model.init), KEY, SOURCE, TARGET)
        params = random_like({"params": jax.eval_shape(init)["params"]})
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(init)["cache"])
        apply = lenient(partial(model.apply, method=model.step, mutable=["cache"]))
        step = jax.jit(
            lambda cache, m, t, p=params, f=apply: f({**p, "cache": cache}, m, SOURCE, t)
        )
        encode = jax.jit(lenient(partial(model.apply, method=model.encode)))
        memory = encode(params, SOURCE)
        logits = []
        for t in range(TARGET.shape[1]):
            out, state = step(cache, memory, jnp.asarray(TARGET[1:].repeat(2, 0)[:, t : t + 1]))
            cache = state["cache"]
            logits.append(out)
        outs.append(np.concatenate(logits, 1))
    assert error(outs[1], outs[0]) < 2 * OUTPUT


def test_layer_has_every_flax_field_with_its_default() -> None:
    theirs, ours = (
        {field.name: field.default for field in dataclasses.fields(layer)}
        for layer in (nn.MultiHeadDotProductAttention, MultiHeadDotProductAttention)
    )
    for name in theirs.keys() - {"parent"}:
        default = ours[name]
        same = default == theirs[name] or (callable(default) and callable(theirs[name]))
        assert same, name
    assert ours["attention_fn"] is attention_fn  # It stands for flax_mha's kernels.


def test_fields_must_be_named() -> None:
    """PyTorch's order (embed_dim, num_heads) would otherwise become (num_heads, dtype)."""
    for layer in (MultiHeadAttention, MultiHeadDotProductAttention):
        with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
            layer(16, 4)
        assert layer(4).clone(dropout_rate=0.1).dropout_rate == 0.1
