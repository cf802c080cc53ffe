"""The examples in the docstrings of the reference run."""

import doctest
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_mha
import flax_mha.nnx
from flax_mha import EncoderBlock, MultiHeadAttention, interop
from tests.repository.test_reference import directives, found
from tests.repository.test_security import CONFIG
from tests.support.oracle import random_like

EXAMPLES = {
    name: examples
    for _, name in directives()
    if (examples := doctest.DocTestParser().get_examples(inspect.getdoc(found(name)) or ""))
}
X = np.ones((2, 16, 64), np.float32)


def drawn(layer: nn.Module) -> Any:
    return random_like(jax.eval_shape(layer.init, jax.random.key(0), X))


def public() -> dict[str, Any]:
    """Return the names available after an import, and usual ones."""
    names = {name: getattr(flax_mha, name) for name in flax_mha.__all__}
    return names | {"jax": jax, "np": np, "nn": nn, "optax": optax, "rng": jax.random.key(0)}


def of_interop() -> dict[str, Any]:
    family = interop.family(CONFIG)
    shapes = jax.eval_shape(family.module.init, jax.random.key(0), *family.example)
    variables = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    interop.save(CONFIG, variables, "path/to/Qwen3-0.6B")
    layer = MultiHeadAttention(8)
    weights = drawn(layer)
    state_dict = interop.to_torch(layer, weights)
    arrays = interop.to_layer(layer, weights, "timm")
    return {
        "config": CONFIG, "variables": variables, "arrays": arrays,
        "layer": SimpleNamespace(state_dict=lambda: state_dict),
        "model": nn.MultiHeadDotProductAttention(8),
    }  # fmt: skip


def of_layer() -> dict[str, Any]:
    layer = MultiHeadAttention(8)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    variables = drawn(layer)
    return {"layer": layer, "model": layer, "variables": variables, "x": X, "mesh": mesh}


def of_clip() -> dict[str, Any]:
    """Return the names of the qk_clip example. The state comes from an optimizer like its own."""
    layer = MultiHeadAttention(8, capture=flax_mha.Capture(("max_logit",)))
    params = drawn(layer)["params"]
    _, found = jax.jit(lambda x: layer.apply({"params": params}, x, mutable="intermediates"))(X)
    state = optax.chain(optax.adam(1e-3), flax_mha.optimizers.qk_clip.qk_clip(100.0)).init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    return {
        "grads": grads, "params": params, "state": state, "intermediates": found["intermediates"],
    }  # fmt: skip


def of_derivatives() -> dict[str, Any]:
    layer = MultiHeadAttention(8)
    params = drawn(layer)
    return {
        "loss": lambda params: jnp.sum(jnp.sin(layer.apply(params, X))),
        "flax_mha": flax_mha, "params": params, "direction": params,
    }  # fmt: skip


def of_function_edits() -> dict[str, Any]:
    return {"jnp": jnp, "splice": lambda x, encoder, decoder: x, "encoder": X, "decoder": X}


def of_captures() -> dict[str, Any]:
    layer = MultiHeadAttention(8, capture=flax_mha.Capture(("z",)))
    model = flax_mha.Encoder(1, EncoderBlock(layer, 16))
    return {"model": model, "variables": drawn(model), "x": X}


# The names that an example uses beside public ones.
GIVEN: dict[str, Any] = {
    "flax_mha.cache": lambda: dict.fromkeys("qkv", jnp.ones((2, 3, 4, 8))),
    "flax_mha.edits.Edit": of_function_edits,
    "flax_mha.edits.values": of_captures,
    "flax_mha.optimizers.qk_clip.qk_clip": of_clip,
    "flax_mha.interop": of_interop,
    "flax_mha.kernels.use": of_derivatives,
    "flax_mha.masks": lambda: {"ids": np.zeros((2, 16), int)},
    "flax_mha.masks.Dilated": dict,
    "flax_mha.optimizers.muon.muon_dimensions": lambda: {"optax": optax},
    "flax_mha.scores": dict,
    "flax_mha.sharding": of_layer,
    "flax_mha.sharding.balanced": dict,
    "flax_mha.sharding.zigzag": of_layer,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    thing = found(name)
    module = thing if inspect.ismodule(thing) else found(name.rpartition(".")[0])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        scope = {**vars(module), **public(), **GIVEN[name]()}
        for example in EXAMPLES[name]:
            exec(example.source, scope)


def test_every_example_has_its_names() -> None:
    assert {*GIVEN} == {*EXAMPLES}
