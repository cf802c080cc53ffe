# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Attention in ten minutes
#
# You go from the formula to a small model that writes, and look at the attention of its heads. This
# takes half a minute on two CPU cores. Open it as a notebook with
# [jupytext](https://jupytext.readthedocs.io), or run it:
# `pip install optax matplotlib && python docs/notebooks/ten_minutes.py`.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_mha import (
    Capture,
    Decoder,
    DecoderBlock,
    LanguageModel,
    MultiHeadAttention,
    dot_product_attention,
    explain,
    generate,
    masks,
    plots,
)
from flax_mha.models import TokenEmbedding
from flax_mha.positions import PositionEmbedding

# %% [markdown]
# ## The formula
#
# Each query is compared with every key. The softmax of these scores gives the weight of each value.
# The result is a weighted mean of the values.

# %%
T, H = 5, 8
q, k, v = (jax.random.normal(jax.random.key(i), (T, H)) for i in range(3))
scores = q @ k.T / jnp.sqrt(H)
weights = jax.nn.softmax(scores, axis=-1)
by_hand = weights @ v
print(np.round(np.array(weights, float), 2))
print("each row sums to", np.round(weights.sum(-1), 3))

# %% [markdown]
# The library's function takes [batch, length, heads, features], so that many of these run in
# parallel.

# %%
with_heads = [x[None, :, None, :] for x in (q, k, v)]
out = dot_product_attention(*with_heads)
np.testing.assert_allclose(out[0, :, 0], by_hand, atol=1e-5)

# %% [markdown]
# ## Masks
#
# A mask says which keys a query may see. Combine masks with `&`, `|` and `~`. Printed, each row is
# a query, and █ is a key that it sees.

# %%
print((masks.Causal() & masks.Window(left=3)).show(8))
print()
texts = jnp.array([0, 0, 0, 1, 1, 1, 1, 2])  # three texts in one row
print((masks.Causal() & masks.Segments(texts)).show(8))

# %% [markdown]
# A gradient shows that a query does not see the future: the output at position 2 does not depend on
# later values.


# %%
def third_output(v):
    out = dot_product_attention(*with_heads[:2], v[None, :, None, :], mask=masks.Causal())
    return out[0, 2].sum()


print(np.abs(jax.grad(third_output)(v)).max(-1) > 0)

# %% [markdown]
# Several kernels compute the same numbers. `explain` says which one runs. A kernel first asks the
# mask about whole tiles, and skips the hidden ones.

# %%
print(explain(*with_heads, mask=masks.Causal()))

# %% [markdown]
# ## The layer
#
# Multi-head attention projects its input to queries, keys and values for several heads, attends in
# each, and projects back. Here, two query heads share each key/value head.

# %%
layer = MultiHeadAttention(num_heads=4, num_kv_heads=2)
x = jax.random.normal(jax.random.key(3), (2, 10, 32))  # [batch, length, features]
variables = layer.init(jax.random.key(4), x)
for name, leaves in variables["params"].items():
    print(f"{name:6}", {leaf: array.shape for leaf, array in leaves.items()})
y = layer.apply(variables, x, mask=masks.Causal() & masks.Lengths(jnp.array([10, 7])))
print("output", y.shape)

# %% [markdown]
# ## A model that learns
#
# The task: letters, a bar, and the same letters backwards. You can complete `dcab|bacd` only by
# looking back, each time one letter further. Attention can do this.

# %%
LETTERS, HALF = 12, 8
BAR = LETTERS


def batch(key, rows):
    letters = jax.random.randint(key, (rows, HALF), 0, LETTERS)
    bar = jnp.full((rows, 1), BAR)
    return jnp.concatenate([letters, bar, letters[:, ::-1]], axis=1)


def as_text(tokens):
    return "".join("abcdefghijkl|"[token] for token in np.asarray(tokens))


print(as_text(batch(jax.random.key(0), 1)[0]))

# %%
block = DecoderBlock(MultiHeadAttention(num_heads=2), mlp_dim=128)
model = LanguageModel(
    TokenEmbedding(LETTERS + 1, 64),
    Decoder(2, block),
    position_embedding=PositionEmbedding("learned", max_length=2 * HALF + 1),
)
variables = model.init(jax.random.key(0), batch(jax.random.key(0), 1))
optimizer = optax.adam(3e-3)


def loss_of(params, tokens):
    logits = model.apply({"params": params}, tokens[:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return each[:, HALF:].mean()  # After the bar; the letters before it are chance.


@jax.jit
def step(params, state, key):
    loss, grads = jax.value_and_grad(loss_of)(params, batch(key, 64))
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


params, state = variables["params"], optimizer.init(variables["params"])
for i in range(301):
    params, state, loss = step(params, state, jax.random.key(1000 + i))
    if i % 75 == 0:
        print(f"step {i:3}: loss {loss:.3f} (chance: {np.log(LETTERS):.3f})")

# %% [markdown]
# ## Look at the heads
#
# `Capture` returns the weights and leaves the output unchanged, bit for bit. A head that does the
# work shows a line from upper right to lower left: after the bar, each query looks at the letter
# that comes next.

# %%
watched = model.clone(
    decoder=Decoder(2, block.clone(attention=MultiHeadAttention(2, capture=Capture(("weights",)))))
)
tokens = batch(jax.random.key(5), 1)
_, sown = watched.apply({"params": params}, tokens[:, :-1], mutable="intermediates")
plots.heads(sown, as_text(tokens[0, :-1]))

# %% [markdown]
# ## Let it write
#
# `generate` passes the prompt to the model in one call. Then it adds one token at a time, with the
# keys and values of all earlier tokens in a cache.

# %%
prompts = batch(jax.random.key(6), 4)
written = generate(model, {"params": params}, prompts[:, : HALF + 1], max_new_tokens=HALF)
for prompt, tokens in zip(prompts[:, : HALF + 1], written.tokens, strict=True):
    print(as_text(prompt), "→", as_text(tokens))
right = (written.tokens == prompts[:, HALF + 1 :]).mean()
print(f"letters right: {right:.0%}")
assert right > 0.9

# %% [markdown]
# Next: [recipes](../recipes.md) for layers from papers, [published models](../models.md) built from
# these parts, and [your own masks, scores, kernels and layers](../own.md).
