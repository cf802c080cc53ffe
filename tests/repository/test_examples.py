"""The examples in the docstrings of public modules, functions and classes run."""

import doctest
import importlib
import inspect
from collections.abc import Iterator
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
from flax_mha import Capture, EncoderBlock, MultiHeadAttention, interop
from tests.interop.test_files import CONFIG, variables
from tests.repository.test_public import MODULES
from tests.support.arrays import random_variables

X = np.ones((2, 16, 64), np.float32)


def documented() -> Iterator[tuple[str, Any]]:
    """Yield public modules, and the functions and classes in them, by name."""
    for name in (*MODULES, "kernels", "optimizers.qk_clip", "optimizers.muon"):
        module = importlib.import_module(f"flax_mha.{name}")
        yield name, module
        for member in getattr(module, "__all__", vars(module)):
            thing = getattr(module, member)
            if getattr(thing, "__module__", "").startswith("flax_mha"):
                yield f"{name}.{member}", thing


EXAMPLES = {
    name: (thing, examples)
    for name, thing in documented()
    if (examples := doctest.DocTestParser().get_examples(inspect.getdoc(thing) or ""))
}


def names_of_interop() -> dict[str, Any]:
    of_model = variables(CONFIG)
    interop.save(CONFIG, of_model, "path/to/Qwen3-0.6B")
    layer = MultiHeadAttention(8)
    weights = random_variables(layer, X)
    state_dict = interop.to_torch(layer, weights)
    return {
        "config": CONFIG, "variables": of_model,
        "arrays": interop.to_layer(layer, weights, "timm"),
        "layer": SimpleNamespace(state_dict=lambda: state_dict),
        "model": nn.MultiHeadDotProductAttention(8),
    }  # fmt: skip


def names_of_layers() -> dict[str, Any]:
    layer = MultiHeadAttention(8)
    variables = random_variables(layer, X)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    return {"layer": layer, "model": layer, "variables": variables, "x": X, "mesh": mesh}


def names_of_clip() -> dict[str, Any]:
    """Return the state of an optimizer like the example's, and what the layer captured."""
    layer = MultiHeadAttention(8, capture=Capture(("max_logit",)))
    params = random_variables(layer, X)["params"]
    _, sown = jax.jit(lambda x: layer.apply({"params": params}, x, mutable="intermediates"))(X)
    state = optax.chain(optax.adam(1e-3), flax_mha.qk_clip(100.0)).init(params)
    return {
        "grads": params,
        "params": params,
        "state": state,
        "intermediates": sown["intermediates"],
    }


def names_of_derivatives() -> dict[str, Any]:
    layer = MultiHeadAttention(8)
    params = random_variables(layer, X)
    return {
        "loss": jax.jit(lambda params: jnp.sum(jnp.sin(layer.apply(params, X)))),
        "flax_mha": flax_mha, "params": params, "direction": params,
    }  # fmt: skip


def names_of_captures() -> dict[str, Any]:
    layer = MultiHeadAttention(8, capture=Capture(("z",)))
    model = flax_mha.Encoder(1, EncoderBlock(layer, 16))
    return {"model": model, "variables": random_variables(model, X), "x": X}


# The names that an example uses, besides public ones.
NAMES: dict[str, Any] = {
    "cache": lambda: dict.fromkeys("qkv", np.ones((2, 3, 4, 8), np.float32)),
    "edits.Edit": lambda: {
        "jnp": jnp,
        "splice": lambda x, encoder, decoder: x,
        "encoder": X,
        "decoder": X,
    },
    "edits.values": names_of_captures,
    "optimizers.qk_clip.qk_clip": names_of_clip,
    "interop": names_of_interop,
    "kernels.use": names_of_derivatives,
    "masks": lambda: {"ids": np.zeros((2, 16), int)},
    "sharding": names_of_layers,
    "sharding.zigzag": names_of_layers,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    thing, examples = EXAMPLES[name]
    module = thing if inspect.ismodule(thing) else importlib.import_module(thing.__module__)
    public = {name: getattr(flax_mha, name) for name in flax_mha.__all__}
    usual = {"jax": jax, "np": np, "nn": nn, "optax": optax, "rng": jax.random.key(0)}
    scope = {**vars(module), **public, **usual, **NAMES.get(name, dict)()}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for example in examples:
            exec(example.source, scope)


def test_every_example_is_found() -> None:
    assert len(EXAMPLES) >= 13
    assert {*NAMES} <= {*EXAMPLES}
