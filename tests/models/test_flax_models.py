"""Models written for Flax's layer and masks work with ours after changing two imports."""

import dataclasses
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_mha
from flax_mha import MultiHeadAttention, MultiHeadDotProductAttention, attention_fn
from tests.support.oracle import error, random_like

KEY = jax.random.key(0)
SOURCE = np.array([[3, 4, 5, 0], [1, 2, 3, 4]])
TARGET = np.array([[3, 4, 5, 6, 0, 0], [1, 2, 3, 4, 5, 6]])
TEXTS = np.array([[1, 1, 2, 2, 0, 0], [1, 1, 1, 2, 3, 3]])
REAL = TARGET > 0


@pytest.fixture(autouse=True)
def as_users_have_it() -> Iterator[None]:
    """Flax's layers and helpers promote dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


HELPERS = {
    name: types.SimpleNamespace(
        layer=source.MultiHeadDotProductAttention, make_causal_mask=source.make_causal_mask,
        make_attention_mask=source.make_attention_mask, combine_masks=source.combine_masks,
    )
    for name, source in (("flax", nn), ("here", flax_mha))
}  # fmt: skip


class Block(nn.Module):
    """A block of unnamed layers, as in Flax's examples."""

    source: str
    decode: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, memory: Any, mask: Any, memory_mask: Any) -> jax.Array:
        layer = HELPERS[self.source].layer
        options = {"num_heads": 2, "use_bias": False, "dropout_rate": 0.1, "deterministic": True}
        y = nn.LayerNorm()(x)
        x = x + layer(**options, decode=self.decode)(y, mask=mask)
        if memory is not None:
            y = nn.LayerNorm()(x)
            x = x + layer(**options)(y, memory, mask=memory_mask)
        return x + nn.Dense(8)(nn.LayerNorm()(x))


class Model(nn.Module):
    """A translator of packed texts like Flax's example `wmt`, with its masks."""

    source: str
    decode: bool = False

    def setup(self) -> None:
        self.embed = nn.Embed(9, 8)
        self.encoder = Block(self.source)
        self.decoder = Block(self.source, self.decode)
        self.layers = nn.scan(
            lambda block, x, *rest: (block(x, *rest), None),
            variable_axes={"params": 0, "cache": 0}, split_rngs={"params": True},
            in_axes=nn.broadcast, length=2,
        )  # fmt: skip

    def encode(self, source: jax.Array) -> jax.Array:
        mask = HELPERS[self.source].make_attention_mask(source > 0, source > 0)
        return self.encoder(self.embed(source), None, mask, None)

    def step(self, memory: jax.Array, source: jax.Array, target: jax.Array, texts: Any) -> Any:
        use, mask = HELPERS[self.source], None
        real = jnp.ones_like(target) > 0 if self.decode else target > 0
        if not self.decode:
            mask = use.combine_masks(
                use.make_attention_mask(real, real, dtype=jnp.bfloat16),
                use.make_causal_mask(target, dtype=jnp.bfloat16),
            )
            same = use.make_attention_mask(texts, texts, jnp.equal, dtype=jnp.bfloat16)
            mask = use.combine_masks(mask, same)
        memory_mask = use.combine_masks(use.make_attention_mask(real, source > 0), None)
        x, _ = self.layers(self.decoder, self.embed(target), memory, mask, memory_mask)
        return self.embed.attend(x)

    def __call__(self, source: jax.Array, target: jax.Array, texts: Any) -> jax.Array:
        return self.step(self.encode(source), source, target, texts)


@pytest.mark.sampled(0.15)
def test_outputs_and_gradients_match_flax() -> None:
    """For real tokens: for fully masked queries Flax averages values and ours returns 0."""
    shapes = jax.eval_shape(Model("flax").init, KEY, SOURCE, TARGET, TEXTS)

    def both(source: str) -> Any:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = Model(source).apply(params, SOURCE, TARGET, TEXTS)
            return jnp.where(REAL[..., None], jnp.sin(logits), 0).sum(), logits[REAL]

        return jax.jit(jax.grad(loss, has_aux=True))(random_like(shapes))

    (grads, out), (expected_grads, expected) = both("here"), both("flax")
    assert error(out, expected) < 4e-6
    size = max(np.linalg.norm(g) for g in jax.tree.leaves(expected_grads))
    for grad, wanted in zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True):
        assert np.linalg.norm(grad - wanted) < 2e-5 * size


@pytest.mark.sampled(0.08)
def test_cached_decoding_matches_flax() -> None:
    """`init` at full length allocates the cache. Each call then decodes one token."""
    outs = []
    for source in HELPERS:
        model = Model(source, decode=True)
        shapes = jax.eval_shape(model.init, KEY, SOURCE, TARGET, None)
        params = random_like({"params": shapes["params"]})
        cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes["cache"])
        memory = jax.jit(partial(model.apply, method=model.encode))(params, SOURCE)
        step = jax.jit(partial(model.apply, texts=None, method=model.step, mutable=["cache"]))
        logits = []
        for t in range(TARGET.shape[1]):
            token = TARGET[1:].repeat(2, 0)[:, t : t + 1]
            out, state = step({**params, "cache": cache}, memory, SOURCE, token)
            cache = state["cache"]
            logits.append(out)
        outs.append(np.concatenate(logits, 1))
    assert error(outs[1], outs[0]) < 4e-6


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
