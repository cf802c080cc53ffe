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
from flax import nnx

import flax_mha.nnx
from flax_mha import CacheConfig, Capture, cache, edits, masks, scores
from flax_mha.positions import Rotary

B, T, D, N = 2, 6, 16, 2
RNG = np.random.default_rng(0)
X = jax.device_put(RNG.normal(size=(B, T, D)).astype(np.float32))
TABLE = RNG.normal(size=(N, T, T)).astype(np.float32)
DECODE = {"decode": True}
step = nnx.jit(lambda layer, x: layer(x, decode=True))


def decoding(tokens: int, encoded: bool = False) -> Callable[[Any], None]:
    """Return a function that gives a layer a cache with some tokens."""

    def change(layer: Any) -> None:
        if encoded:
            nnx.jit(lambda layer: layer(X[:, :1], kv=cache.Encoded(X), decode=True))(layer)
        else:
            layer.init_cache((B, T, D))
        if tokens:
            step(layer, X[:, :tokens])

    return change


def sow(layer: Any) -> None:
    nnx.jit(lambda layer: layer(X, sow_weights=True))(layer)


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
    "view": lambda m, _: viewed(m),
}  # fmt: skip
FAST = ("plain", "mask", "scores", "cache", "sown")
# A pure dict has typed keys and tuples, which msgpack has not.
UNSAVED = {"dropout": ("save",), "sown": ("save",)}


@pytest.mark.sampled(0.048)
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")  # Flax's own layer warns too.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in STATES]
)
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


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ring", "int8 cache", "memory")]


@pytest.mark.parametrize("name", ["cache", *SLOW])
def test_cache_can_be_set(name: str) -> None:
    layer = make(name, 0)
    held, after = nnx.as_pure(layer.kv), nnx.clone(layer)
    expected = step(after, X[:, :1])
    other = nnx.clone(layer)
    other.kv = held
    np.testing.assert_array_equal(other.cached_key, layer.cached_key)
    np.testing.assert_array_equal(step(other, X[:, :1]), expected)
    got, wanted = nnx.as_pure(other.kv), nnx.as_pure(after.kv)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_steps_write_into_the_same_variables() -> None:
    layer = make("cache", 0)
    key = layer.kv.key
    step(layer, X[:, :1])
    assert layer.kv.key is key
    np.testing.assert_array_equal(layer.cache_index, 4)


def test_caches_of_flax_are_refused() -> None:
    theirs = nnx.MultiHeadAttention(N, D, decode=True, rngs=nnx.Rngs(0))
    theirs.init_cache((B, T, D))
    layer = flax_mha.nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match=r"got cache_index; pass nnx\.state\(layer, nnx\.Param\)"):
        nnx.update(layer, nnx.state(theirs))
    nnx.update(layer, nnx.state(theirs, nnx.Param))
    np.testing.assert_allclose(layer(X), theirs(X, decode=False), atol=1e-5)


@pytest.mark.parametrize("name", ["cache", *SLOW[:2]])
def test_functions_of_collections_take_states(name: str) -> None:
    layer = make(name, 0)
    graph, state = nnx.split(layer)
    held = nnx.as_pure(layer.kv)
    for new, expected in (
        (cache.fork(state, np.array([1, 1, 0])), held.fork(np.array([1, 1, 0]))),
        (cache.truncate(state, 3), held.truncate(3)),
        (cache.reset(state), held.reset()),
    ):
        got = nnx.as_pure(nnx.merge(graph, new).kv)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    np.testing.assert_array_equal(cache.free(state), held.free())


@functools.cache
def steps(name: str, mode: str, is_on: bool) -> list[jax.Array]:
    """Decode two steps with each of two cache dtypes, with a mode of nnx's variables on or off."""
    cls, fields, *_ = STATES[name]
    outs, run = [], (lambda layer, x: layer(x, decode=True)) if mode == "hijax" else step
    with nnx.var_defaults(**{mode: is_on}):
        layer = getattr(flax_mha.nnx, cls)(N, D, rngs=nnx.Rngs(0), **fields)
        for dtype in (None, "bfloat16" if name == "forgetting" else "int8"):
            layer.init_cache((B, T, D), dtype)
            outs += [run(layer, X[:, t : t + 1]) for t in range(2)]
    return outs


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("mode", ["hijax", "ref"])
@pytest.mark.parametrize("name", [k for k, x in STATES.items() if x[3] is DECODE and k != "memory"])
def test_layers_decode_with_any_kind_of_variables(name: str, mode: str) -> None:
    for plain, other in zip(steps(name, mode, False), steps(name, mode, True), strict=True):
        np.testing.assert_array_equal(other, plain)


def test_layers_of_one_mask_hold_their_own_arrays() -> None:
    mask = masks.Keys(np.arange(T) < 4)
    one, other = (
        flax_mha.nnx.MultiHeadAttention(N, D, mask=mask, rngs=nnx.Rngs(0)) for _ in range(2)
    )
    nnx.update(one, nnx.State({"mask": {"real": nnx.Variable(np.arange(T) < 2)}}))
    assert one.mask.real.sum() == 2
    assert mask.real.sum() == other.mask.real.sum() == 4
    assert isinstance(one.mask, masks.Keys)
    call = nnx.jit(lambda layer, **call: layer(X, **call))
    np.testing.assert_array_equal(call(one), call(other, mask=masks.Keys(np.arange(T) < 2)))


class Block(nnx.Module):
    """A layer inside a model, under a name."""

    def __init__(self, **fields: Any) -> None:
        self.attention = flax_mha.nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(0), **fields)

    def __call__(self, x: jax.Array, **call: Any) -> jax.Array:
        return x + self.attention(x, **call)


@pytest.mark.sampled(0.3)
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("way", ["capture", "pop"])
@pytest.mark.parametrize(
    ("fields", "call"),
    [({}, {"sow_weights": True}), ({"capture": Capture(("weights", "z"))}, {})],
    ids=["sow_weights", "field"],
)
def test_values_are_captured_and_popped(fields: Any, call: Any, way: str) -> None:
    """In a model, under jit, and twice, as popped values are gone."""
    model = Block(**fields)
    wanted, weights = nnx.jit(lambda layer: layer(X, return_weights=True))(Block().attention)

    @nnx.jit
    def forward(model: Block) -> jax.Array:
        return model(X, **call)

    for _ in range(2):
        if way == "capture":
            out, sown = nnx.jit(nnx.capture(forward, nnx.Intermediate))(model)
        else:
            out = forward(model)
            sown = nnx.pop(model, nnx.Intermediate)
        found = nnx.to_pure_dict(sown)["attention"]
        assert found.keys() == {"attention_weights", *(["attention_z"] if fields else [])}
        (first,) = found["attention_weights"]
        np.testing.assert_allclose(first, weights, atol=1e-6)
        np.testing.assert_allclose(out, X + wanted, atol=1e-6)
        assert not nnx.to_pure_dict(nnx.state(model, nnx.Intermediate))


def test_equal_fields_share_a_definition_and_sizes_are_read_only() -> None:
    """Equal functions that were made twice are not equal, so a layer keeps no initializers."""

    def make(**fields: Any) -> Any:
        init = nnx.initializers.normal(0.02)
        return flax_mha.nnx.MultiHeadAttention(N, D, kernel_init=init, rngs=nnx.Rngs(0), **fields)

    defaults = {"kernel": "auto", "dropout_rate": 0.0, "decode": False, "num_kv_heads": N}
    layer = make()
    assert nnx.graphdef(make(**defaults)) == nnx.graphdef(layer)
    layer.decode = True
    assert nnx.graphdef(make(decode=True)) == nnx.graphdef(layer) != nnx.graphdef(make())
    with pytest.raises(AttributeError, match="num_heads"):
        layer.num_heads = 4
