"""The state of nnx layers: every kind of it goes through every operation of nnx, unchanged."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from flax import nnx

import flax_mha.nnx
from flax_mha import CacheConfig, cache, edits, masks, scores
from flax_mha.positions import Rotary

B, T, D, N = 2, 6, 16, 2
RNG = np.random.default_rng(0)
X = jax.device_put(RNG.normal(size=(B, T, D)).astype(np.float32))
TABLE = RNG.normal(size=(N, T, T)).astype(np.float32)
DECODE = {"decode": True}


def decoding(tokens: int, encoded: bool = False) -> Callable[[Any], None]:
    """Return a function that gives a layer a cache with some tokens."""

    def change(layer: Any) -> None:
        if encoded:
            layer(X[:, :1], kv=cache.Encoded(X), decode=True)
        else:
            layer.init_cache((B, T, D))
        if tokens:
            nnx.jit(lambda layer: layer(X[:, :tokens], decode=True))(layer)

    return change


def sow(layer: Any) -> None:
    layer(X, sow_weights=True)


def edit(layer: Any) -> None:
    edits.attach(layer, {"attention_z": edits.Edit(0.5, TABLE[:1, 0, :1])}, X)


# The class, fields, a change of the new layer, and arguments of the call.
STATES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "plain": ("MultiHeadAttention", {"normalize_qk": True}, None, {}),
    "mask": ("MultiHeadAttention", {"mask": masks.Keys(np.arange(T) < 4)}, None, {}),
    "masks": (
        "MultiHeadAttention",
        {"mask": masks.Causal() & masks.Segments(jnp.arange(T) // 3) | (np.eye(T) > 0)}, None, {},
    ),
    "table": ("MultiHeadAttention", {"mask": jnp.tri(T, dtype=bool)}, None, {}),
    "scores": (
        "MultiHeadAttention",
        {"scores": (scores.Bias(TABLE), scores.RelativeBias(), scores.Alibi(jnp.ones(N))),
         "sinks": True, "scale": "learned", "gate": "head"}, None, {},
    ),
    "empty cache": ("MultiHeadAttention", {"rotary": Rotary()}, decoding(0), DECODE),
    "cache": ("MultiHeadAttention", {}, decoding(3), DECODE),
    "int8 cache": ("MultiHeadAttention", {"cache": CacheConfig("int8")}, decoding(3), DECODE),
    "ring": (
        "MultiHeadAttention", {"cache": CacheConfig(slots=3), "mask": masks.Window(2, 0)},
        decoding(3), DECODE,
    ),
    "memory": ("MultiHeadAttention", {}, decoding(0, True), DECODE),
    "sown": ("MultiHeadAttention", {}, sow, {}),
    "edits": ("MultiHeadAttention", {}, edit, {}),
    "dropout": ("MultiHeadAttention", {"dropout_rate": 0.5}, None, {"deterministic": False}),
    "latent": (
        "MultiHeadLatentAttention",
        {"kv_rank": 4, "rope_dim": 4, "head_dim": 4, "rotary": Rotary()}, decoding(3), DECODE,
    ),
    "differential": ("DifferentialAttention", {}, decoding(3), DECODE),
    "forgetting": ("ForgettingAttention", {}, decoding(3), DECODE),
    "talking heads": ("TalkingHeadsAttention", {}, None, {}),
    "chosen blocks": ("ChosenBlocksAttention", {"block": 2, "count": 2}, None, {}),
}  # fmt: skip


@functools.cache
def parts(name: str, seed: int) -> Any:
    cls, fields, change, _ = STATES[name]
    layer = getattr(flax_mha.nnx, cls)(N, D, **fields, rngs=nnx.Rngs(seed))
    if change is not None:
        change(layer)
    return nnx.split(layer)


def make(name: str, seed: int) -> Any:
    return nnx.merge(*parts(name, seed))


def replaced(layer: Any, other: Any, is_saved: bool = False) -> Any:
    """Return the other layer with the state of a layer, which goes through a pure dict."""
    kind = nnx.Not(nnx.RngState) if is_saved else ...
    pure = nnx.to_pure_dict(nnx.state(layer, kind))
    if is_saved:
        pure = flax.serialization.msgpack_restore(flax.serialization.to_bytes(pure))
    state = nnx.state(other, kind)
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(other, state)
    return other


def updated(layer: Any, other: Any) -> Any:
    nnx.update(other, nnx.state(layer))
    return other


def tabulated(layer: Any, name: str) -> Any:
    nnx.tabulate(layer, X[:, :1] if "decode" in STATES[name][3] else X, **STATES[name][3])
    return layer


def scanned(layer: Any) -> Any:
    return nnx.scan(lambda m, _: (m, 0), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(
        layer, jnp.zeros(2)
    )[0]


def shown(layer: Any) -> Any:
    assert "query" in repr(layer)
    assert "query" in repr(nnx.state(layer))
    assert "query" in treescope.render_to_text(layer)
    return layer


def mapped(layer: Any) -> Any:
    """Return one of two layers that were stacked, and mapped over."""
    graph, state = nnx.split(layer)
    two = nnx.merge(graph, jax.tree.map(lambda x: jnp.stack([x, x]), state))
    same = nnx.vmap(lambda m: m)(two)
    return nnx.merge(graph, jax.tree.map(lambda x: x[1], nnx.state(same)))


def viewed(layer: Any) -> Any:
    layer.kernel = "reference"
    return nnx.view(layer, decode=layer.decode, batch_size=B, max_length=T)


OPERATIONS: dict[str, Callable[[Any, str], Any]] = {
    "update": lambda m, name: updated(m, make(name, 1)),
    "replace": lambda m, name: replaced(m, make(name, 1)),
    "save": lambda m, name: replaced(m, make(name, 1), is_saved=True),
    "merge": lambda m, _: nnx.merge(*nnx.split(m)),
    "clone": lambda m, _: nnx.clone(m),
    "deepcopy": lambda m, _: copy.deepcopy(m),
    "pickle": lambda m, _: pickle.loads(pickle.dumps(m)),
    "tabulate": tabulated,
    "jit": lambda m, _: nnx.jit(lambda m: m)(m),
    "scan": lambda m, _: scanned(m),
    "vmap": lambda m, _: mapped(m),
    "show": lambda m, _: shown(m),
    "tree": lambda m, _: jax.tree.map(lambda x: x, m),
    "view": lambda m, _: viewed(m),
}  # fmt: skip
# A pure dict has typed keys and tuples, which msgpack has not.
UNSAVED = {"dropout": ("save",), "sown": ("save",)}


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")  # Flax's own layer warns too.
@pytest.mark.parametrize("name", STATES)
def test_operations_keep_the_output(name: str) -> None:
    call = STATES[name][3]
    x = X[:, 3:4] if "decode" in call else X

    @jax.jit
    def output(state: Any) -> jax.Array:
        return nnx.merge(graph, state)(x, **call)

    graph, state = parts(name, 0)
    expected = output(state)
    assert hash(graph) == hash(nnx.graphdef(make(name, 1)))
    assert graph == nnx.graphdef(make(name, 1))
    for operation, apply in OPERATIONS.items():
        if operation in UNSAVED.get(name, ()):
            continue
        layer = apply(nnx.merge(graph, state), name)
        same = nnx.state(layer)
        assert jax.tree.structure(same) == jax.tree.structure(state), operation
        np.testing.assert_array_equal(output(same), expected, err_msg=operation)
