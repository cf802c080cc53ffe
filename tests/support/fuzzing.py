"""A grammar of calls of the public API, with valid and odd values for every argument."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import flax_mha
from flax_mha import (
    CacheConfig,
    Capture,
    cache,
    dot_product_attention,
    explain,
    masks,
    positions,
    sampling,
    scores,
    sharding,
)
from flax_mha.models.embeddings import PatchEmbedding, TokenEmbedding
from flax_mha.positions import PositionEmbedding, Rotary
from tests.masks.catalogue import Scene
from tests.support.catalogue import examples
from tests.support.layer_parts import PARTS

KEY = np.zeros(2, np.uint32)
B, T, N, H = 2, 4, 2, 4
D = N * H


class Traced(NamedTuple):
    """A placeholder for a traced array."""

    shape: tuple[int, ...]
    dtype: Any = jnp.float32


SHAPES = ((), (0,), (2,), (3,), (4,), (2, 4), (4, 4), (2, 2), (2, 4, 8), (2, 4, 2, 4), (1, 1, 4, 4))
DTYPES = ("float32", "int32", "bool", "bfloat16", "int8", "uint32", "complex64", "float8_e4m3fn")


def odd(draw: random.Random) -> Any:
    """Return a value that few arguments accept."""
    shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
    return draw.choice((
        lambda: draw.choice((None, True, False, 0, 1, -1, 3, 2**31, 2**40, 0.5, -2.0, 1j, "foo", "",
                             float("nan"), float("inf"), b"x", (), [], {}, set(), ..., object)),
        lambda: draw.choice(([0, 1, 2, 3], (1, 2), [0.5, 1.0], [[1], [1, 2]], ["a"], [None],
                             {"a": 1}, (None, None), range(4), slice(3), np.float64(2),
                             np.int64(3))),
        lambda: draw.choice((lambda: 3, lambda x: x, lambda *x: None, lambda *x: x[0], dict, len)),
        lambda: draw.choice((masks.Causal(), masks.Causal, scores.SoftCap(3.0), scores.SoftCap,
                             Rotary(), Rotary, layer(), PartitionSpec("data"), jax.random.key(0))),
        lambda: np.ones(shape, dtype),
        lambda: np.array(["a", "b"]),
        lambda: jax.device_put(np.ones(shape, dtype)),
        lambda: Traced(shape, dtype),
    ))()  # fmt: skip


def layer(**fields: Any) -> flax_mha.MultiHeadAttention:
    return flax_mha.MultiHeadAttention(**{"num_heads": N} | fields)


def decoder_block(**fields: Any) -> flax_mha.DecoderBlock:
    return flax_mha.DecoderBlock(**{"attention": layer(), "mlp_dim": 4} | fields)


def language_model(**fields: Any) -> flax_mha.LanguageModel:
    good = {"embedding": TokenEmbedding(5, D), "decoder": flax_mha.Decoder(1, decoder_block())}
    return flax_mha.LanguageModel(**good | fields)


def run(build: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Build a module from its fields and initialize it on the named inputs."""

    def call(**given: Any) -> Any:
        inputs = [given.pop(name) for name in names]
        call = {name[5:]: given.pop(name) for name in list(given) if name.startswith("call_")}
        return build(**given).init_with_output(KEY, *inputs, **call)

    return call


def of_example(kind: Any) -> Callable[..., Any]:
    """Call a layer with a mask or a score function of this class."""

    def call(**fields: Any) -> Any:
        x = kind(**fields)
        call: Any = {"mask": x} if isinstance(x, masks.Mask) else {"scores": (x,)}
        return layer(**call).init_with_output(KEY, X)

    return call


def fields_of(x: Any) -> dict[str, Any]:
    """Return the arguments that make a mask or a score function."""
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}


def of_cache(name: str) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        empty = flax_mha.KVCache.empty((B,), 8, N, H)
        return getattr(empty, name)(**given)

    return call


def of_collection(name: str) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        return getattr(cache, name)(**{"collection": COLLECTION} | given)

    return call


def generated(variables: Any, **given: Any) -> Any:
    return flax_mha.generate(given.pop("model"), variables, **given)


def on_a_mesh(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        mesh = jax.make_mesh((2, 2), ("data", "model")).abstract_mesh
        rules = nn.logical_axis_rules(sharding.RULES)
        with jax.sharding.use_abstract_mesh(mesh), rules:
            return fn(**given)

    return call


X = np.ones((B, T, D), np.float32)
TOKENS = np.ones((B, T), np.int32)
QKV = {name: np.ones((B, T, N, H), np.float32) for name in "qkv"}
ROW = np.arange(T)
COLLECTION = {"kv": cache.KVCache.empty((B,), 8, N, H)}
VARIABLES = jax.eval_shape(lambda: language_model().init(KEY, TOKENS))
SEEN = {
    "mask": (masks.Causal(), np.ones((T, T), bool)[None], masks.Keys(np.ones((B, T), bool))),
    "bias": (np.ones((T, T), np.float32), Traced((N, 1, 1))),
}
CAPTURED = {"capture": (Capture(("weights",)), Capture(("lse",), heads=(0, 1), queries=(1,)))}
STANDS = {"positions": (ROW, TOKENS), "lengths": (np.array([2, 4]), [1, 4]), "order": (ROW[::-1],)}
TRAINED = {"deterministic": (True, False), "sow_weights": (True,)}
CALL = {**SEEN, "scores": ((scores.SoftCap(3.0),),)} | CAPTURED | {
    "sinks": (np.ones(N, np.float32),), "scale": (0.5, Traced(())), "dropout_rate": (0.5,),
    "dropout_rng": (KEY, jax.random.key(1)), "broadcast_dropout": (True,), "q_positions": (ROW, 3),
    "kv_positions": (ROW, TOKENS), "kernel": ("blockwise", "reference", "flex"),
    "precision": ("highest",), "return_weights": (True,), "return_residuals": (True,),
    "normalizer": ("sigmoid", "softpick"),
}  # fmt: skip
HELD = {name: CALL[name] for name in CALL if "positions" not in name}
MODULE = {"dtype": ("bfloat16",), "param_dtype": ("float32",), "precision": ("highest",),
          "kernel_init": (jax.nn.initializers.zeros,), "partitioned": (True,)}  # fmt: skip
FIELDS = MODULE | CAPTURED | {
    "num_heads": (4,), "qkv_features": (16,), "out_features": (8,), "broadcast_dropout": (True,),
    "dropout_rate": (0.5,), "deterministic": (True,),
    "out_kernel_init": (jax.nn.initializers.ones,), "bias_init": (jax.nn.initializers.zeros,),
    "decode": (True,), "cache": (CacheConfig("int8"), CacheConfig(slots=3)),
    "normalize_qk": (True,), "num_kv_heads": (1,), "head_dim": (6,), "project_out": (False,),
    "kernel": ("blockwise",),
}  # fmt: skip
for _part in PARTS.values():
    for _name, _value in _part.fields.items():
        FIELDS[_name] = (*FIELDS.get(_name, ()), _value)
BLOCK = {"attention": (layer(decode=True),), "mlp_dim": (4,), "norm": ("rmsnorm",),
         "pre_norm": (False,), "activation": ("silu", "gelu_exact"), "norm_epsilon": (1e-5,),
         "mlp_bias": (False,), "gated": (True,), "dropout_rate": (0.5,),
         "remat": (True, ("z", "lse"))}  # fmt: skip
THROUGH = {f"call_{name}": values for name, values in (SEEN | STANDS | TRAINED).items()}
STANDING = {name: THROUGH[name] for name in sorted(THROUGH) if name != "call_bias"}
RULES = {"eos": (0,), "rng": (KEY,), "temperature": (1.0,), "top_k": (2,), "top_p": (0.9,),
         "min_p": (0.1,), "beams": (2,), "length_penalty": (1.0,), "early_stopping": ("never",),
         "capacity": (12,), "lengths": (np.array([1, 4]), [2, 2])}  # fmt: skip
NEW = {"q": QKV["q"], "key": QKV["k"], "value": QKV["v"]}

# The operators of masks are called as such.
EXAMPLES = {
    name: x for name, x in examples(Scene((B,), T, T, N=N)).items()
    if not isinstance(x, masks.And | masks.Or | masks.Not)
}  # fmt: skip

# By name: the frequency, the function, its required arguments, and its optional ones.
Target = tuple[int, Callable[..., Any], dict[str, Any], dict[str, tuple[Any, ...]]]
TARGETS: dict[str, Target] = {
    "dot_product_attention": (9, dot_product_attention, QKV, CALL),
    "explain": (4, explain, QKV, CALL),
    **{name: (1, of_example(type(x)), fields_of(x), {}) for name, x in EXAMPLES.items()},
    "&": (1, lambda a, left: a & masks.Causal() if left is True else masks.Causal() & a,
          {"a": masks.Causal(), "left": True}, {"left": (False,)}),
    "|": (1, lambda a, b: masks.Causal() | b, {"a": 0, "b": masks.Causal()}, {}),
    "dense": (1, masks.Causal().dense, {"T": T}, {"S": (5,), "batch": ((2,),), "num_heads": (3,)}),
    "sinusoidal": (2, positions.sinusoidal, {"positions": T, "features": 6},
                   {"base": (9.0,), "dtype": ("bfloat16",), "halves": (True,)}),
    "rotary": (3, positions.rotary, {"x": QKV["q"], "positions": ROW},
               {"base": (9.0,), "fraction": (0.5,), "interleaved": (True,)}),
    "PositionEmbedding": (2, run(PositionEmbedding, "x"), {"x": X},
                          {"kind": ("sinusoidal", "sinusoidal_halves", "none"), "max_length": (9,),
                           "dtype": ("bfloat16",), "call_positions": (ROW,)}),
    "fields": (6, run(layer, "x"), {"x": X}, FIELDS),
    "layer": (6, run(layer, "q", "k", "v"), {"q": X, "k": None, "v": None},
              THROUGH | {"call_scores": ((scores.SoftCap(3.0),),), "call_return_weights": (True,),
                         "call_head_mask": (np.ones(N, np.float32),), "k": (X,), "v": (X,),
                         "call_dropout_rng": (KEY,), "dropout_rate": (0.5,),
                         "call_kv": ((QKV["k"], QKV["v"]),), "call_return_kv": (True,),
                         "rotary": (Rotary(),)}),
    "MLP": (2, run(flax_mha.MLP, "x"), {"hidden": 4, "x": X},
            MODULE | {"activation": ("silu",), "gated": (True,), "dropout_rate": (0.5,)}),
    "EncoderBlock": (2, run(flax_mha.EncoderBlock, "x"),
                     {"attention": layer(), "mlp_dim": 4, "x": X},
                     BLOCK | THROUGH | {"call_return_kv": (True,)}),
    "DecoderBlock": (2, run(decoder_block, "x", "memory"), {"x": X, "memory": None},
                     BLOCK | THROUGH | {"cross_attention": (layer(),), "memory": (X,)}),
    "Encoder": (2, run(flax_mha.Encoder, "x"),
                {"num_layers": 1, "block": flax_mha.EncoderBlock(layer(), 4), "x": X},
                THROUGH | {"scan": (True,), "kv_from": ((None,),)}),
    "LanguageModel": (3, run(language_model, "tokens"), {"tokens": TOKENS},
                      STANDING | {"tied": (False,), "call_at": ([0, 3],), "dropout_rate": (0.5,)}),
    "Classifier": (2, run(flax_mha.Classifier, "x"),
                   {"embedding": TokenEmbedding(5, D), "num_classes": 3, "x": TOKENS,
                    "encoder": flax_mha.Encoder(1, flax_mha.EncoderBlock(layer(), 4))},
                   {"positions": ("none",), "dropout_rate": (0.5,), "call_lengths": ([1, 4],)}),
    "TokenEmbedding": (1, run(TokenEmbedding, "x"), {"vocab_size": 5, "features": D, "x": TOKENS},
                       {"dtype": ("bfloat16",), "partitioned": (True,)}),
    "PatchEmbedding": (1, run(PatchEmbedding, "x"),
                       {"patch_size": 2, "features": D, "x": np.ones((B, 4, 4, 1), np.float32)},
                       {"dtype": ("bfloat16",)}),
    "Capture": (2, lambda **x: dot_product_attention(**QKV, capture=Capture(**x)),
                {"what": ("entropy",)}, {"heads": ((0,), [1]), "queries": (range(2),)}),
    "CacheConfig": (1, lambda **x: run(layer, "x")(x=X, decode=True, cache=CacheConfig(**x)), {},
                    {"dtype": ("int8", "bfloat16"), "slots": (5,)}),
    "KVCache.empty": (2, flax_mha.KVCache.empty,
                      {"batch": (B,), "slots": 8, "num_kv_heads": N, "head_dim": H},
                      {"v_head_dim": (3,), "dtype": ("int8",), "window": (5,)}),
    "append": (2, of_cache("append"), {"key": NEW["key"], "value": NEW["value"]},
               {"lengths": ([1, 4],)}),
    "extend": (3, of_cache("extend"), NEW, HELD | {"lengths": ([1, 4],)}),
    "truncate": (1, of_cache("truncate"), {"lengths": 3}, {}),
    "fork": (1, of_cache("fork"), {"rows": np.array([1, 0])}, {}),
    "cache.fork": (1, of_collection("fork"), {"rows": np.array([1, 0])}, {}),
    "cache.truncate": (1, of_collection("truncate"), {"lengths": [1, 2]}, {}),
    "generate": (4, generated, {"model": language_model(), "variables": VARIABLES,
                                "prompt": TOKENS, "max_new_tokens": 2}, RULES),
    **{name: (1, getattr(sampling, name), {"logits": np.ones((B, 5), np.float32), key: x}, {})
       for name, key, x in (("top_k", "k", 2), ("top_p", "p", 0.5), ("min_p", "p", 0.5))},
    "zigzag": (1, sharding.zigzag, {"length": 16, "devices": 4}, {}),
    "balanced": (1, sharding.balanced, {"lengths": [5, 11], "devices": 4, "tile": 2},
                 {"mask": (flax_mha.masks.Window(3, 2),)}),
    "constrain": (1, on_a_mesh(sharding.constrain),
                  {"x": X, "names": ("batch", "length", "embed")}, {}),
}  # fmt: skip


class Call(NamedTuple):
    """A call with the names of its odd arguments."""

    target: str
    given: dict[str, Any]
    odd: tuple[str, ...]


def calls(count: int) -> Iterator[Call]:
    """Return an iterator over the same calls on every run."""
    draw = random.Random(0)
    names = [name for name, (often, *_) in TARGETS.items() for _ in range(often)]
    for _ in range(count):
        name = draw.choice(names)
        _, _, needed, more = TARGETS[name]
        extra = draw.sample(sorted(more), min(len(more), draw.choice((0, 0, 1, 2, 3))))
        given = dict(needed) | {key: draw.choice(more[key]) for key in extra}
        wrong = draw.sample(
            sorted({*needed, *more}), min(len({*needed, *more}), draw.choice((0, 1, 1, 1, 2)))
        )
        yield Call(name, given | {key: odd(draw) for key in wrong}, tuple(wrong))
