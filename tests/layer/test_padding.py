"""The contents of padding reach neither outputs nor gradients, of inputs or parameters."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import (
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    LanguageModel,
    MultiHeadAttention,
    masks,
)
from flax_mha.models.embeddings import TokenEmbedding

B, T, S, D = 2, 6, 5, 8
LENGTHS, MEMORY = np.array([4, 6]), np.array([5, 2])
ORDER = np.array([3, 1, 0, 5, 4, 2])
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(B, T, D)), RNG.normal(size=(B, S, D))
REAL, SEEN = np.arange(T) < LENGTHS[:, None], np.arange(S) < MEMORY[:, None]

LAYER = MultiHeadAttention(2, num_kv_heads=1)
PLAIN = MultiHeadAttention(2, head_dim=4)
CROSS = DecoderBlock(LAYER, 16, cross_attention=PLAIN)
BLOCK = EncoderBlock(LAYER, 16)


MEMORIES = {"memory_lengths": MEMORY}
# The module, its inputs, the bools of their real tokens, and further arguments.
MODULES: dict[str, tuple[nn.Module, tuple, tuple, dict[str, Any]]] = {
    "self": (LAYER, (X,), (REAL,), {}),
    "ordered": (LAYER, (X,), (LENGTHS[:, None] > ORDER,), {"order": ORDER}),
    "cross": (PLAIN, (X, Y), (REAL, np.ones_like(SEEN)), {"mask": masks.Lengths(MEMORY)}),
    "block": (BLOCK, (X,), (REAL,), {}),
    "post": (BLOCK.clone(pre_norm=False), (X,), (REAL,), {}),
    "decoder block": (CROSS, (X, Y), (REAL, SEEN), MEMORIES),
    "encoder": (Encoder(2, BLOCK), (X,), (REAL,), {}),
    "remat": (Encoder(1, BLOCK.clone(remat=True)), (X,), (REAL,), {}),
    "scan": (Encoder(2, BLOCK, scan=True), (X,), (REAL,), {}),
    "decoder": (Decoder(2, CROSS, scan=True), (X, Y), (REAL, SEEN), MEMORIES),
    "language model": (
        LanguageModel(TokenEmbedding(7, D), Decoder(1, CROSS)),
        (np.arange(B * T).reshape(B, T) % 7, Y), (REAL, SEEN), MEMORIES,
    ),
}  # fmt: skip


def filled(x: np.ndarray, real: np.ndarray, padding: float, dtype: str) -> jax.Array:
    """Return the input with this value in its padding. Token ids beyond the table if they are
    ints.
    """
    if np.issubdtype(x.dtype, np.integer):
        return jnp.where(real, x, 0 if padding == 0 else 10**6)
    real = real if real.ndim == x.ndim else real[..., None]
    return jnp.where(real, jnp.asarray(x, dtype), jnp.asarray(padding, dtype))


# In bfloat16 those that the others are part of.
HALF = ("ordered", "decoder", "language model")
CALLS = [(name, "float32") for name in MODULES] + [(name, "bfloat16") for name in HALF]


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize(("name", "dtype"), CALLS)
def test_padding_reaches_no_output_or_gradient(name: str, dtype: str) -> None:
    module, inputs, real, call = MODULES[name]
    clean = [filled(x, some, 0, dtype) for x, some in zip(inputs, real, strict=True)]
    call = {**call, "lengths": LENGTHS}
    # Flax's norms promote bfloat16 silently.
    with jax.numpy_dtype_promotion("standard"):
        _check(module, clean, real, call, inputs, dtype)


def _check(
    module: nn.Module, clean: list[jax.Array], real: tuple, call: dict[str, Any], inputs: tuple,
    dtype: str,
) -> None:  # fmt: skip
    params = module.init(jax.random.key(0), *clean, **call)
    floats = [n for n, x in enumerate(clean) if jnp.issubdtype(x.dtype, jnp.floating)]

    @jax.jit
    def run(params: Any, *inputs: jax.Array) -> Any:
        def loss(params: Any, floats_: list[jax.Array]) -> Any:
            given = list(inputs)
            for n, x in zip(floats, floats_, strict=True):
                given[n] = x
            out = module.apply(params, *given, **call)
            # Sum over real tokens only.
            out = jnp.where(real[0][..., None], out, 0)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, [inputs[n] for n in floats])

    want = run(params, *clean)
    for padding in (-np.inf, np.nan, 1e20):
        dirty = [filled(x, some, padding, dtype) for x, some in zip(inputs, real, strict=True)]
        for a, b in zip(jax.tree.leaves(run(params, *dirty)), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)
    assert all(np.abs(x).sum() > 0 for x in jax.tree.leaves(want[1][1]))
