# Over 300 lines: one table, a row for each mistake.
"""Every mistake a user can make: the rule it breaks, what came, and what to do instead."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import (
    MLP,
    Classifier,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
    attention_fn,
    cache,
    dot_product_attention,
    explain,
    masks,
    positions,
    sampling,
    scores,
    sharding,
)
from flax_mha.cache import KVCache
from flax_mha.generation import generate
from flax_mha.models import Decoder, LanguageModel, PatchEmbedding, TokenEmbedding, Translator
from flax_mha.positions import PositionEmbedding, Rotary
from flax_mha.search import decoding

KEY = jax.random.key(0)
IDS = jnp.arange(4)
X = jnp.ones((2, 4, 8))  # [B, T, D]
Q = jnp.ones((2, 4, 6, 8))  # [B, T, N, H]
TOKENS, IMAGES = jnp.ones((2, 4), int), jnp.ones((2, 4, 6, 1))
ATTENTION = MultiHeadAttention(2)
BLOCK = EncoderBlock(ATTENTION, 16)
ENCODER = Encoder(1, BLOCK)
EMBED = TokenEmbedding(5, 8)

CROSS = DecoderBlock(ATTENTION, 16, cross_attention=MultiHeadAttention(2))
DECODER = Decoder(1, DecoderBlock(ATTENTION, 16))
MODEL = LanguageModel(EMBED, DECODER)
TABLE = LanguageModel(EMBED, DECODER, position_embedding=PositionEmbedding(max_length=5))
TRANSLATOR = Translator(ENCODER, LanguageModel(EMBED, Decoder(1, CROSS)))

Case = tuple[str, Callable[[], Any], type[Exception], str]


def kernel(name: str, error: type[Exception], message: str, *qkv: Any, **call: Any) -> list[Case]:
    """One call of dot_product_attention, and the same question to explain."""
    qkv = qkv + (Q,) * (3 - len(qkv))
    return [
        (f"attention: {name}", lambda: dot_product_attention(*qkv, **call), error, message),
        (f"explain: {name}", lambda: explain(*qkv, **call), error, message),
    ]


def layer(name: str, error: type[Exception], message: str, *inputs: Any, **fields: Any) -> Case:
    """One initialization of the layer; `call` holds the arguments of its call."""
    call = fields.pop("call", {})
    build = MultiHeadAttention(**{"num_heads": 2} | fields)
    return module(f"layer: {name}", error, message, build, *(inputs or (X,)), **call)


def module(
    name: str, error: type[Exception], message: str, build: nn.Module, *inputs: Any, **call: Any
) -> Case:
    # Traced, not run: all that is checked is known before anything is computed.
    init = partial(build.init, KEY, **call)
    return name, lambda: jax.eval_shape(init, *inputs), error, message


def ones(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


KERNEL: list[Case] = [
    *kernel("rank 2", ValueError, r"q must have shape \[\*B, length, heads.*\(4, 8\); split", X[0]),
    *kernel("no features", ValueError, r"q must have.*0\); split", Q[..., :0]),
    *kernel("no heads", ValueError, r"k must have.*0, 8\); split", Q, Q[:, :, :0]),
    *kernel("ranks", ValueError, r"same rank, got q \(2, 4, 6, 8\), k \(4, 6.*add", Q, Q[0]),
    *kernel("batch", ValueError, r"same batch.*k \(1, 4, 6, 8\).*broadcast them", Q, Q[:1]),
    *kernel("lengths", ValueError, r"agree in length and heads.*v \(2, 3.*give every", Q, Q,
            Q[:, :3]),
    *kernel("kv heads", ValueError, r"agree in length.*v \(2, 4, 3, 8\)", Q, Q, Q[:, :, :3]),
    *kernel("head features", ValueError, r"same head features H.*k \(2, 4, 6, 7\).*project", Q,
            Q[..., :7]),
    *kernel("groups", ValueError, r"must divide num_heads=6, got 4; use one of \[1, 2, 3, 6\]",
            Q, Q[:, :, :4], Q[:, :, :4]),
    *kernel("integers", TypeError, r"q must be floating point, got int32; .*cast", Q.astype(int)),
    *kernel("bool", TypeError, r"v must be .* got bool; a mask goes into mask=", Q, Q, Q > 0),
    *kernel("float8", TypeError, r"q must have at least 16 bits a number, got float8_e4m3fn.*scale",
            *[Q.astype(jnp.float8_e4m3fn)] * 3),
    *kernel("complex", TypeError, r"k must be real, got complex64.*real and imaginary",
            Q, Q.astype(jnp.complex64)),
    *kernel("numeric mask", ValueError,
            r"of bools, or of 1 \(may attend\) and 0, got -0.5 in float32; compare.*bias=",
            mask=-0.5 * ones(4, 4)),
    *kernel("int mask", ValueError, r"of bools, or of 1.*got 2 in int32; compare it.*ids > 0",
            mask=2 * ones(4, 4, dtype=int)),
    *kernel("NaN mask", ValueError, r"of bools.*got nan in float32", mask=jnp.nan * ones(4, 4)),
    *kernel("complex mask", TypeError, r"of bools, or of 1.*and 0, got complex64; compare",
            mask=ones(4, 4, dtype=jnp.complex64)),
    *kernel("mask shape", ValueError,
            r"broadcast to \[\*B, N, T, S\] = \(2, 6, 4, 4\), got \(2, 4, 4\); "
            r".*mask\[\.\.\., None", mask=ones(2, 4, 4, dtype=bool)),
    *kernel("mask rank", ValueError, r"got \(1, 2, 6, 4, 4\)",
            mask=ones(1, 2, 6, 4, 4, dtype=bool)),
    *kernel("mask class", TypeError, r"Mask or a bool array, got type", mask=masks.Causal),
    *kernel("mask name", TypeError, r"Mask or a bool array, got str", mask="causal"),
    *kernel("bias shape", ValueError, r"bias must broadcast.*got \(3, 1, 1\); .*bias\[",
            bias=ones(3, 1, 1)),
    *kernel("bias dtype", TypeError, r"bias must be floating point, got int32", bias=IDS),
    *kernel("rate 1", ValueError, r"dropout_rate must be in \[0, 1\), got 1.0; 0 turns",
            dropout_rate=1.0),
    *kernel("rate < 0", ValueError, r"dropout_rate.*got -0.1", dropout_rate=-0.1),
    *kernel("rate NaN", ValueError, r"dropout_rate.*got nan", dropout_rate=float("nan")),
    *kernel("rate str", TypeError, r"dropout_rate must be a number, got '.1' of str",
            dropout_rate=".1"),
    *kernel("no rng", ValueError, r"=0.5 needs a dropout_rng, got None; give", dropout_rate=0.5),
    layer("order: cross-attention", ValueError, "order says where the tokens of self-attention",
          X, X + 1, call={"order": IDS}),
    layer("order: a token twice", ValueError,
          r"order must be a permutation of 0 … 3, got \[0, 0, 1, 2\]; say of each token once",
          call={"order": [0, 0, 1, 2]}),
    layer("order: by row", ValueError, r"order must have shape \[T\] = \(4,\), got \(2, 4\)",
          call={"order": TOKENS}),
    layer("order: floats", TypeError, r"order must be integers, got float64",
          call={"order": [0.0, 1.0, 2.0, 3.0]}),
    layer("order: decoding", ValueError, "got it in decoding or with inputs_k; leave it out",
          decode=True, call={"order": IDS}),
    ("zigzag", lambda: sharding.zigzag(12, 4), ValueError,
     "2 pieces on each of 4 devices, got 12 tokens; pad them to a multiple of 8"),
    ("zigzag: float", lambda: sharding.zigzag(16.0, 4), TypeError,
     "length must be an int, got 16.0"),
    ("zigzag: bool", lambda: sharding.zigzag(16, True), TypeError,
     "devices must be an int, got True"),
    ("zigzag: < 0", lambda: sharding.zigzag(-16, 4), ValueError,
     "length must be at least 1, got -16"),
    ("zigzag: none", lambda: sharding.zigzag(16, 0), ValueError,
     "devices must be at least 1, got 0"),
    *kernel("positions", ValueError, r"q_positions must.*\(4,\).*got \(3,\); give one",
            q_positions=IDS[:3]),
    *kernel("kv positions", ValueError, r"kv_positions must.*got \(2, 3\)",
            kv_positions=TOKENS[:, :3]),
    *kernel("float positions", TypeError, r"q_positions must be integers, got float32; cast",
            q_positions=ones(4)),
    *kernel("capture", ValueError, r"tuple of names out of \('weights',.*got \('entropies',\)",
            capture=("entropies",)),
    *kernel("capture str", ValueError, r"tuple of names.*got 'lse'", capture="lse"),
    *kernel("capture heads", ValueError, r"capture_heads must be in \[-6, 6\), got \(0, 6\)",
            capture=("lse",), capture_heads=(0, 6)),
    *kernel("capture a head", ValueError, r"capture_heads takes indices, such as.*got 3",
            capture=("lse",), capture_heads=3),
    *kernel("capture twice", ValueError, r"capture_heads must name each index once, got \(0, -6\)",
            capture=("lse",), capture_heads=(0, -6)),
    *kernel("capture queries", ValueError, r"capture_queries must be in \[-4, 4\), got range",
            capture=("weights",), capture_queries=range(5)),
    *kernel("unknown", ValueError, r"'auto' or one of \[.*'reference'.*got 'flash'",
            kernel="flash"),
    *kernel("kernel None", ValueError, r"kernel must be 'auto' or.*got None", kernel=None),
    *kernel("Lengths shape", ValueError,
            r"Lengths.kv must.*\(2,\) or \[\*B, T\] = \(2, 4\), got \(3,\); "
            r"give one", mask=masks.Lengths(IDS[:3])),
    *kernel("Lengths scalar", ValueError, r"Lengths.kv must.*got \(\)", mask=masks.Lengths(3)),
    *kernel("Lengths dtype", TypeError, r"Lengths.kv must be integers, got float32; cast",
            mask=masks.Lengths(ones(2))),
    *kernel("Lengths q", ValueError, r"Lengths.q must.*\(2,\), got \(2, 4\)",
            mask=masks.Causal() & ~masks.Lengths(IDS[:2], q=TOKENS)),
    *kernel("mask of keys", ValueError,
            r"got \(2, 3\); a mask of keys.*masks.Keys\(mask\), or mask\[\.\.\., None, None, :\]",
            Q, Q[:, :3], Q[:, :3], mask=ones(2, 3, dtype=bool)),
    *kernel("ids beyond int32", ValueError, r"Segments.q must fit int32, got 4294967296, which wou",
            mask=masks.Segments(np.array([0, 1, 2, 2**32]))),
    *kernel("lengths beyond int32", ValueError, r"Lengths.kv must fit int32, got 4294967295",
            mask=masks.Lengths(np.array([1, 2**32 - 1], np.uint32))),
    *kernel("positions beyond int32", ValueError, r"q_positions must fit int32, got 2147483650",
            q_positions=2**31 - 1),
    *kernel("list of floats", TypeError, r"q_positions must be integers, got float64",
            q_positions=[0.0, 1.0, 2.0, 3.0]),
    *kernel("wide window", ValueError, r"Window.right must be at least 0 and below 2³⁰, got 21474",
            mask=masks.Window(None, 2**31 - 1)),
    *kernel("window float", TypeError, r"Window.left must be an int or None, got 1.5",
            mask=masks.Window(1.5)),
    *kernel("near buckets", ValueError, r"max_distance must exceed 8,.*of 32 buckets, got 8; raise",
            scores=(scores.RelativeBias(ones(6, 32), max_distance=8),)),
    *kernel("far buckets", ValueError, r"max_distance must exceed 16,.*got 4",
            scores=(scores.RelativeBias(ones(6, 32), bidirectional=False, max_distance=4),)),
    *kernel("cap inf", ValueError, r"SoftCap.cap must be finite, got inf",
            scores=(scores.SoftCap(float("inf")),)),
    *kernel("cap NaN", ValueError, r"SoftCap.cap must be finite, got nan",
            scores=(scores.SoftCap(float("nan")),)),
    *kernel("cap name", TypeError, r"SoftCap.cap must be a number, got '50' of str",
            scores=(scores.SoftCap("50"),)),
    *kernel("slopes", TypeError, r"Alibi.slopes must be an array, got list",
            scores=(scores.Alibi([1.0] * 6),)),
    *kernel("scale name", TypeError, r"scale must be a number, got '0.5' of str", scale="0.5"),
    *kernel("scale bool", TypeError, r"scale must be a number, got True of bool", scale=True),
    *kernel("scale complex", TypeError, r"scale must be a number, got 1j of complex", scale=1j),
    *kernel("scale by head", ValueError, r"scale must be one number, got an array of shape \(6,\)",
            scale=ones(6)),
    *kernel("scale NaN", ValueError, r"scale must be finite, got nan", scale=float("nan")),
    *kernel("scale int array", TypeError, r"scale must be floating point, got int32", scale=IDS[0]),
    *kernel("rng", TypeError, r"dropout_rng must be one JAX key, got 0 of int; give jax.random.key",
            dropout_rate=0.5, dropout_rng=0),
    *kernel("rngs", TypeError, r"dropout_rng must be one JAX key, got key<fry> \(2,\)",
            dropout_rate=0.5, dropout_rng=jax.random.split(KEY)),
    *kernel("precision", ValueError, r"precision must be a jax.lax.Precision.*got 'foo'; give",
            precision="foo"),
    *kernel("flag", TypeError, r"return_weights must be True or False, got 'no' of str",
            return_weights="no"),
    *kernel("list", TypeError, r"k must be an array, got list; convert", Q, [1.0], Q),
    *kernel("None", TypeError, r"v must be an array, got NoneType", Q, Q, None),
    *kernel("capture None", ValueError, r"tuple of names out of.*got None", capture=None),
    *kernel("capture float heads", TypeError, r"capture_heads must be integers, got float64",
            capture=("lse",), capture_heads=(0.5,)),
    *kernel("Keys shape", ValueError,
            r"Keys.real must.*\(4,\) or \[\*B, S\] = \(2, 4\), got \(2, 3\)",
            mask=masks.Keys(ones(2, 3, dtype=bool))),
    *kernel("Keys list", TypeError, r"Keys.real must be an array, got list",
            mask=masks.Keys([True] * 4)),
    *kernel("one score", TypeError, r"sequence, got one SoftCap; give.*scores=\(SoftCap\(…\),\)",
            scores=scores.SoftCap(50.0)),
    *kernel("score function", TypeError, r"of flax_mha.scores, got <func.*give scores.Score\(fn\)",
            scores=(lambda s: s,)),
    *kernel("score class", TypeError, r"got .*Alibi.*give Alibi\(…\), with its parentheses",
            scores=(scores.Alibi,)),
    *kernel("scores None", TypeError, r"a sequence of those.*got None; .*or \(\) for none",
            scores=None),
    ("masks: and", lambda: masks.Causal() and masks.Lengths(IDS), TypeError,
     r"neither true nor false.*joined by &, \| and ~, not by and.*write Causal\(\) & Lengths"),
    ("masks: not", lambda: not masks.Causal(), TypeError, r"neither true nor false"),
    ("masks: & None", lambda: masks.Causal() & None, TypeError,
     r"got NoneType; leave it out; masks.combine\(a, b\) takes None"),
    ("masks: & with a list", lambda: masks.Causal() & [True], TypeError, r"bool array, got list"),
    ("masks: | with a name", lambda: masks.Causal() | "all", TypeError, r"bool array, got str"),
]  # fmt: skip

LAYER: list[Case] = [
    layer("heads", ValueError, r"num_heads=3 must divide.*got 8; set head_dim", num_heads=3),
    layer("heads 0", ValueError, r"num_heads must be at least 1, got 0", num_heads=0),
    layer("heads None", TypeError, r"num_heads must be an int, got None", num_heads=None),
    layer("heads float", TypeError, r"num_heads must be an int, got 2.0 of float", num_heads=2.0),
    layer("heads bool", TypeError, r"num_heads must be an int, got True of bool", num_heads=True),
    layer("kv heads", ValueError, r"must divide num_heads=4, got 3; use one of \[1, 2, 4\]",
          num_heads=4, num_kv_heads=3),
    layer("kv heads 0", ValueError, r"num_kv_heads must be at least 1, got 0", num_kv_heads=0),
    layer("head_dim", ValueError, r"head_dim must be at least 1, got -1", head_dim=-1),
    layer("v_head_dim", TypeError, r"v_head_dim must be an int, got '3' of str", v_head_dim="3"),
    layer("out_features", ValueError, r"out_features must be at least 1, got 0", out_features=0),
    layer("qkv_features", ValueError,
          r"qkv_features must be num_heads \* head_dim = 2 \* 3 = 6, got 8; "
          r"give one", qkv_features=8, head_dim=3),
    layer("rate", ValueError, r"dropout_rate must be in \[0, 1\), got 2; 0 turns", dropout_rate=2),
    layer("dtype", TypeError, r"dtype must be a dtype, got 'foo'; give one", dtype="foo"),
    layer("attention_fn: sinks", ValueError, r"sinks needs a kernel of flax_mha.*leave out one",
          attention_fn=nn.dot_product_attention, sinks=True),
    layer("attention_fn: kernel", ValueError, r"kernel needs a kernel.*leave out one",
          attention_fn=nn.dot_product_attention, kernel="reference"),
    layer("attention_fn: capture", ValueError, r"capture needs a kernel.*leave out one",
          attention_fn=nn.dot_product_attention, capture=("lse",)),
    layer("attention_fn: weights", ValueError, r"return_weights needs a kernel.*leave out one",
          attention_fn=nn.dot_product_attention, call={"return_weights": True}),
    layer("attention_fn: no mask", ValueError, r"must take mask, which.*function of q, k, v; give",
          attention_fn=lambda q, k, v: q, mask=masks.Causal()),
    layer("attention_fn: no module", ValueError, r"attention_fn must take module, which",
          attention_fn=lambda q, k, v: q, call={"sow_weights": True}),
    layer("attention_fn: shape", ValueError, r"must give \[\*B, T, N, Hv.*float32 \(2, 4, 2\)",
          attention_fn=lambda q, k, v: q[..., 0]),
    ("attention_fn: einsum", lambda: attention_fn(Q, Q, Q, qk_attn_weights_einsum=jnp.einsum),
     ValueError, r"qk_attn_weights_einsum must be None.*leave out attention_fn"),
    layer("mask field", TypeError, r"Mask or a bool array, got str", mask="causal"),
    layer("kernel", ValueError, r"'auto' or one of .*got 'flash'", kernel="flash"),
    layer("rotary class", TypeError, r"rotary must be a function.*give.*parentheses",
          rotary=Rotary),
    layer("lengths rows", ValueError, r"lengths must have shape \[\*B\] = \(2,\), got \(4,\); give",
          call={"lengths": IDS}),
    layer("lengths too long", ValueError, r"lengths must be in 0 … 4, got \[3, 5\]; each counts",
          call={"lengths": np.array([3, 5])}),
    layer("lengths negative", ValueError, r"lengths must be in 0 … 4, got \[-1, 4\]",
          call={"lengths": [-1, 4]}),
    layer("dtype", TypeError, r"dtype must be a dtype, got 'foo'; give one such", dtype="foo"),
    layer("dtype int", TypeError, r"dtype must be a floating dtype, got int32", dtype=jnp.int32),
    layer("dtype array", TypeError, r"dtype must be a dtype, got Array", dtype=IDS),
    ("cache: rows", lambda: KVCache.empty((2,), 4, 6, 8).fork(ones(2)), TypeError,
     r"rows must be integers, got float32; cast"),
    ("cache: rows by two", lambda: KVCache.empty((2,), 4, 6, 8).fork(TOKENS), ValueError,
     r"rows must have shape \[R\], got \(2, 4\)"),
    ("cache: truncate", lambda: KVCache.empty((2,), 4, 6, 8).truncate(IDS), ValueError,
     r"lengths must be one number or have shape \[\*B\] = \(2,\), got \(4,\); give"),
    ("cache: batch", lambda: KVCache.empty(2, 4, 6, 8), TypeError,
     r"batch must be a tuple of sizes, got 2 of int; give \(2,\)"),
    ("cache: dtype", lambda: KVCache.empty((2,), 4, 6, 8, dtype="foo"), TypeError,
     r"the dtype of a cache must be a dtype, got 'foo'"),
    ("cache: list of keys", lambda: KVCache.empty((2,), 4, 6, 8).append([1.0], Q), TypeError,
     r"keys must be an array, got list"),
    ("zigzag: devices", lambda: sharding.zigzag(8, 2.0), TypeError,
     r"devices must be an int, got 2"),
    ("masks: dense", lambda: masks.Causal().dense(2.5), TypeError, r"T must be an int, got 2.5"),
    layer("param_dtype", TypeError, r"param_dtype must be a dtype, got 'foo'", param_dtype="foo"),
    layer("precision", ValueError, r"precision must be a jax.lax.Prec.*got 'foo'", precision="foo"),
    layer("flag", TypeError, r"use_bias must be True or False, got 1 of int", use_bias=1),
    layer("init", TypeError, r"kernel_init must be a function.*got 'zeros'", kernel_init="zeros"),
    layer("init class", TypeError, r"bias_init must be a function.*of 3 arguments, got one of",
          bias_init=nn.initializers.zeros_init),
    layer("one score", TypeError, r"scores must be a sequence, got one SoftCap",
          call={"scores": scores.SoftCap(50.0)}),
    layer("None", TypeError, r"inputs_q must be an array, got NoneType", None),
    layer("int8", TypeError, r"inputs_q must be floating point, got int8", X.astype("int8")),
    layer("rotary arguments", TypeError, r"rotary must.*of 2 arguments, got one of \(x\)",
          rotary=lambda x: x),
    layer("rotary shape", ValueError, r"rotary must keep the shape of.*got None; return what",
          rotary=lambda x, positions: None),
    layer("lengths dtype", TypeError, r"lengths must be integers, got float32; cast",
          call={"lengths": ones(2)}),
    layer("cache_window", ValueError,
          r"cache_window=4 keeps the last 4.*got mask=Causal\(\); give mask=.*W at most 3",
          decode=True, cache_window=4, mask=masks.Causal()),
    layer("cache_window 0", ValueError, r"cache_window must be at least 1, got 0",
          decode=True, cache_window=0),
    layer("cache_dtype", TypeError, r"cache_dtype must be a floating dtype or int8, got int32",
          decode=True, cache_dtype="int32"),
    ("cache: window", lambda: KVCache.empty((2,), 4, 6, 8, window=4), ValueError,
     r"needs at least 5 slots, got 4; give"),
    ("cache: keys", lambda: KVCache.empty((2,), 3, 6, 8).append(Q, Q), ValueError,
     r"keys for the cache must.*at most S.*\(2, 6, 3, 8\), got \(2, 4, 6, 8\); initialize"),
    ("cache: values", lambda: KVCache.empty((2,), 4, 6, 8, 7).append(Q, Q), ValueError,
     r"values for the cache must.*\(2, 6, 4, 7\), got \(2, 4, 6, 8\); initialize"),
    ("cache: a ring's mask",
     lambda: KVCache.empty((2,), 8, 6, 8, window=4).extend(Q, Q, Q, mask=jnp.ones((4, 8), bool)),
     ValueError, r"slots are not positions.*got one of shape \(1, 1, 4, 8\).*give rules"),
    ("cache: free", lambda: cache.free({}), ValueError, r"free needs.*got none; give variables"),
    layer("rotary True", TypeError, r"rotary must be a function.*got True", rotary=True),
    layer("odd rotary", ValueError, r"must be even.*fraction=1.0 of H=3; choose", head_dim=3,
          rotary=Rotary()),
    layer("positions", ValueError,
          r"positions must have shape \[T\] = \(4,\).*got \(5,\); give one",
          rotary=Rotary(), call={"positions": jnp.arange(5)}),
    layer("head mask", ValueError,
          r"head_mask must have.*\(2,\) or \[\*B, N\] = \(2, 2\), got \(4,\)",
          call={"head_mask": ones(4)}),
    layer("head mask list", TypeError, r"head_mask must be an array, got list",
          call={"head_mask": [1, 0]}),
    layer("head mask complex", TypeError, r"head_mask must be real, got complex64; take its abs",
          call={"head_mask": ones(2, dtype=jnp.complex64)}),
    layer("capture", ValueError, r"capture takes a tuple.*got \('logits',\)", capture=("logits",)),
    layer("positions for nobody", ValueError, r"rotary is None; set it.*or drop positions",
          call={"positions": IDS}),
    layer("list of floats as positions", TypeError, r"positions must be integers, got float64",
          rotary=Rotary(), call={"positions": [0.0, 1.0, 2.0, 3.0]}),
    layer("ragged positions", TypeError, r"positions must be integers, got \[\[0\], .*pad it",
          rotary=Rotary(), call={"positions": [[0], [1, 2]]}),
    layer("three positions", TypeError, r"positions must be integers, got a tuple of arrays; stack",
          rotary=Rotary(), call={"positions": (IDS, IDS, IDS)}),
    layer("values without keys", ValueError, r"inputs_v needs inputs_k, got None; .*as inputs_k", X,
          None, X),
    layer("rank", ValueError, r"inputs_q must have shape \[\*B, length, f.*\(8,\); add", X[0, 0]),
    layer("no features", ValueError, r"inputs_q must have.*\(2, 4, 0\); .*one feature", X[..., :0]),
    layer("batch", ValueError, r"inputs must have.*inputs_k \(1, 4, 8\).*broadcast the batch", X,
          X[:1]),
    layer("lengths", ValueError, r"inputs must have.*inputs_v \(2, 3, 8\); .*every key", X, X,
          X[:, :3]),
    layer("token ids", TypeError, r"inputs_q must be floating point, got int32; embed",
          X.astype(int)),
    layer("float8", TypeError, r"inputs_q must have at least 16 bits a number, got float8_e5m2",
          X.astype(jnp.float8_e5m2)),
    layer("complex", TypeError, r"inputs_k must be real, got complex64", X,
          X.astype(jnp.complex64)),
    layer("list", TypeError, r"inputs_q must be an array, got list; convert it", [[1.0]]),
    layer("mask shape", ValueError, r"broadcast.*\(2, 2, 4, 4\), got \(5, 4\)",
          call={"mask": ones(5, 4, dtype=bool)}),
    layer("no deterministic", ValueError, r'"deterministic" must be passed', dropout_rate=0.5),
    ("layer: no rng", lambda: MultiHeadAttention(2, dropout_rate=0.5).apply(
        ATTENTION.init(KEY,
                       X), X, deterministic=False),
     flax.errors.InvalidRngError, r'needs PRNG for "dropout"'),
    ("layer: other features", lambda: ATTENTION.apply(ATTENTION.init(KEY, X), X[..., :6]),
     flax.errors.ScopeParamShapeError, r"kernel.*\(8, 2, 4\)"),
]  # fmt: skip

MODULES: list[Case] = [
    ("sinusoidal: features", lambda: positions.sinusoidal(4, 0), ValueError,
     r"features must.*1, got 0"),
    ("rotary: odd", lambda: positions.rotary(Q[..., :3], IDS), ValueError, r"even.*H=3; choose"),
    ("rotary: fraction", lambda: positions.rotary(Q, IDS, fraction=1.5), ValueError,
     r"at most H.*1.5"),
    ("rotary: rank", lambda: positions.rotary(X[0], IDS), ValueError,
     r"x must have.*\(4, 8\); split"),
    ("rotary: dtype", lambda: positions.rotary(Q, ones(4)), TypeError,
     r"integers, got float32; cast"),
    ("rotary: integers", lambda: positions.rotary(Q.astype(int), IDS), TypeError,
     r"x must be floating"),
    ("rotary: length", lambda: positions.rotary(Q, IDS[:3]), ValueError,
     r"\[T\] = \(4,\).*got \(3,\)"),
    module("position: beyond the table", ValueError,
           r"positions must be in 0 … 3, the rows of the learned.*got \[0, 1, 2, 4\]; raise",
           PositionEmbedding(), X, positions=np.array([0, 1, 2, 4])),
    module("position: kind", ValueError, r"one of \['learned', 'none', 'sinusoidal'\], got 'rope'",
           PositionEmbedding("rope"), X),
    module("position: long", ValueError, r"max_length=3 rows, but the input is 4 long; raise",
           PositionEmbedding(max_length=3), X),
    module("position: max_length", TypeError, r"max_length must be an int",
           PositionEmbedding(max_length="9"), X),
    module("position: shape", ValueError, r"positions must have.*got \(3,\); give",
           PositionEmbedding(), X, IDS[:3]),
    module("position: dtype", TypeError, r"positions must be int", PositionEmbedding(), X, ones(4)),
    module("position: rank", ValueError, r"x must have.*\(8,\); add", PositionEmbedding(), X[0, 0]),
    module("position: tokens", TypeError, r"x must be floating.*int32; embed", PositionEmbedding(),
           TOKENS),
    *(module(f"{name}: {kind}", TypeError, f"x must be {message}", build, x)
      for name, build in (("block", BLOCK), ("encoder", ENCODER), ("mlp", MLP(4)))
      for kind, x, message in (
          ("ints", X.astype(int), "floating point, got int32; embed"),
          ("bools", X > 0, "floating point, got bool"),
          ("int8", X.astype("int8"), "floating point, got int8"),
          ("list", [[1.0]], "an array, got list; convert"),
          ("None", None, "an array, got NoneType"))),
    module("block: rank", ValueError, r"x must have shape \[\*B, length.*got \(\); add", BLOCK,
           X[0, 0, 0]),
    module("language model: at", ValueError, r"at must be in 0 … 3, got \[1, 4\]; each", MODEL,
           TOKENS, at=np.array([1, 4])),
    module("language model: float at", TypeError, r"at must be integers, got float", MODEL, TOKENS,
           at=[0.5, 1.0]),
    module("language model: order", TypeError, r"order must be integers, got <U3", MODEL, TOKENS,
           order="abc"),
    module("classifier: encoder", TypeError, r"encoder must be a flax_mha.Encoder, got Multi",
           Classifier(EMBED, ATTENTION, 3), TOKENS),
    ("sinusoidal: base", lambda: positions.sinusoidal(4, 2, base=0), ValueError,
     r"base must be above 0, got 0"),
    ("top_p", lambda: sampling.top_p(ones(5), 2.0), ValueError,
     r"top_p must be in \(0, 1\], got 2"),
    ("top_p: list", lambda: sampling.top_p([0.5], 0.5), TypeError, r"logits must be an array, got"),
    module("mlp: hidden", ValueError, r"hidden must be at least 1, got 0", MLP(0), X),
    module("mlp: hidden None", TypeError, r"hidden must be an int, got None", MLP(None), X),
    module("mlp: activation", ValueError, r"one of \['gelu', 'relu', 'silu'\], got 'tanh'",
           MLP(4, "tanh"), X),
    module("mlp: rate", ValueError, r"dropout_rate.*got 1.0; 0 turns", MLP(4, dropout_rate=1.0), X),
    *(
        module(f"no deterministic: {type(build).__name__}", ValueError,
               r"dropout_rate=0.5 needs to know whether to drop, got deterministic=None; give",
               build, *given)
        for build, *given in (
            (MLP(4, dropout_rate=0.5), X),
            (EncoderBlock(ATTENTION, 16, dropout_rate=0.5), X),
            (Encoder(1, EncoderBlock(ATTENTION, 16, dropout_rate=0.5), scan=True), X),
            (Decoder(1, DecoderBlock(ATTENTION, 16, dropout_rate=0.5)), X),
            (Classifier(EMBED, ENCODER, 3, dropout_rate=0.5), TOKENS),
            (LanguageModel(EMBED, Decoder(1, DecoderBlock(ATTENTION, 16)), dropout_rate=0.5),
             TOKENS),
        )
    ),
    module("no deterministic: weights", ValueError, r'"deterministic" must be passed',
           EncoderBlock(MultiHeadAttention(2, dropout_rate=0.5), 16), X),
    module("block: norm", ValueError, r"norm must be one of \['layernorm'.*got 'batch'",
           EncoderBlock(ATTENTION, 16, norm="batch"), X),
    module("block: attention", TypeError,
           r"attention must be a flax_mha.MultiHeadAttention, got Multi.*build",
           EncoderBlock(nn.MultiHeadDotProductAttention(2), 16), X),
    module("block: features", ValueError,
           r"keep the shape.*\(2, 4, 8\).*got \(2, 4, 6\); leave out_f",
           EncoderBlock(MultiHeadAttention(2, out_features=6), 16), X),
    module("block: rate", ValueError, r"dropout_rate.*got 1.5",
           EncoderBlock(ATTENTION, 16, dropout_rate=1.5), X),
    module("encoder: layers", ValueError, r"num_layers must be at least 1, got 0",
           Encoder(0, BLOCK), X),
    module("encoder: block", TypeError, r"block must be a flax_mha.EncoderBlock, got Multi",
           Encoder(1, ATTENTION), X),
    module("tokens: vocab", ValueError, r"vocab_size must be at least 1, got 0",
           TokenEmbedding(0, 8), TOKENS),
    module("tokens: dtype", TypeError, r"tokens must be integers, got float32; cast", EMBED, X),
    module("tokens: list under jit", TypeError, r"tokens.*a list of arrays; stack", EMBED,
           [[1, 2]]),
    module("patch: size", ValueError, r"multiples of the patch \(4, 4\), got \(2, 4, 6, 1\); pad",
           PatchEmbedding(4, 8), IMAGES),
    module("patch: three", ValueError, r"one number, or height and width, got \(2, 2, 1\)",
           PatchEmbedding((2, 2, 1), 8), IMAGES),
    module("patch: zero", ValueError, r"patch_width must be at least 1, got 0",
           PatchEmbedding((2, 0), 8), IMAGES),
    module("patch: float", TypeError, r"patch_height must be an int, got 2.0",
           PatchEmbedding(2.0, 8), IMAGES),
    module("patch: rank", ValueError, r"images must have shape.*got \(4, 6\); pad",
           PatchEmbedding(2, 8), IMAGES[0, ..., 0]),
    module("patch: bytes", TypeError, r"images must be floating.*uint8.*cast", PatchEmbedding(2, 8),
           IMAGES.astype("uint8")),
    module("classifier: classes", ValueError, r"num_classes must be at least 1, got 0",
           Classifier(EMBED, ENCODER, 0), TOKENS),
    module("classifier: positions", ValueError, r"'none', 'sinusoidal'\], got 'rope'",
           Classifier(EMBED, ENCODER, 3, "rope"), TOKENS),
    module("classifier: rate", ValueError, r"dropout_rate.*got 1.0",
           Classifier(EMBED, ENCODER, 3, dropout_rate=1.0), TOKENS),
    module("classifier: lengths", ValueError, r"Lengths.kv must.*got \(3,\)",
           Classifier(EMBED, ENCODER, 3), TOKENS, lengths=IDS[:3]),
    module("classifier: lengths per query", ValueError,
           r"lengths must have shape \[\*B\] = \(2,\), got \(2, 4\); give one",
           Classifier(EMBED, ENCODER, 3), TOKENS, lengths=TOKENS),
    module("classifier: lengths dtype", TypeError, r"must be integers, got float32",
           Classifier(EMBED, ENCODER, 3), TOKENS, lengths=ones(2)),
    ("sharding.of: no mesh", lambda: sharding.of(ATTENTION.init, KEY, X), ValueError,
     r"need a mesh.*none is set; wrap in"),
]  # fmt: skip

LISTED = LanguageModel(
    EMBED, Decoder(1, DecoderBlock(MultiHeadAttention(2, mask=masks.Lengths(jnp.ones(2, int))), 16))
)


def generated(
    name: str, error: type[Exception], message: str, model: Any = MODEL, prompt: Any = TOKENS,
    **call: Any,
) -> Case:  # fmt: skip
    """One call of generate; nothing is compiled, so that no variables are needed."""
    call = {"max_new_tokens": 3} | call
    return f"generate: {name}", lambda: generate(model, {}, prompt, **call), error, message


MODELS: list[Case] = [
    module("decoder block: memory for nobody", ValueError,
           r"memory and memory_mask are for cross_attention, which is None; set",
           DecoderBlock(ATTENTION, 16), X, X),
    module("decoder block: no memory", ValueError, r"needs a memory.*got None; give the enc", CROSS,
           X),
    module("decoder block: one layer twice", ValueError, r"must be two modules.*layer.copy\(\)",
           DecoderBlock(ATTENTION, 16, cross_attention=ATTENTION), X, X),
    module("decoder block: cross attention", TypeError, r"cross_attention must be a flax_mha.Mul",
           DecoderBlock(ATTENTION, 16, cross_attention=EMBED), X, X),
    module("decoder: block", TypeError, r"block must be a flax_mha.DecoderBlock, got EncoderBlock",
           Decoder(1, BLOCK), X),
    module("language model: decoder", TypeError, r"decoder must be a flax_mha.Decoder, got Enc",
           LanguageModel(EMBED, ENCODER), TOKENS),
    module("translator: decoder", TypeError, r"decoder must be a flax_mha.LanguageModel, got Dec",
           Translator(ENCODER, DECODER), TOKENS, TOKENS),
    ("language model: positions", lambda: jax.eval_shape(lambda: decoding(TABLE).apply(
        decoding(TABLE).init(KEY, TOKENS), TOKENS[:, :1], mutable=["cache"])), ValueError,
     r"position_embedding needs to know where the tokens stand; give positions="),
    generated("model", TypeError, r"must be a LanguageModel or a Translator.*got Encoder", ENCODER),
    generated("list in a field", TypeError, r"model must be hashable.*no arrays", LISTED),
    generated("start", ValueError, r"got start=None for a Translator; give it", TRANSLATOR),
    generated("start for nobody", ValueError, r"got start=1 for a LanguageModel; drop it", start=1),
    generated("prompt", TypeError, r"prompt must be integers, got float32; cast", prompt=X),
    generated("ragged prompt", TypeError, r"prompt.*got \[\[1\], \[1, 2\]\], which is ragged; pad",
              prompt=[[1], [1, 2]]),
    generated("prompt beyond int32", ValueError, r"prompt must fit int32, got 4294967296, which",
              prompt=[[2**32]]),
    ("generate: variables", lambda: generate(MODEL, 3, TOKENS, max_new_tokens=1), TypeError,
     r"variables must be those of the model, a mapping, got int; give"),
    generated("rng", TypeError, r"rng must be one JAX key, got int32 \(4,\); give", rng=IDS),
    generated("eos", ValueError, r"eos must be in 0 … 2147483647, got -1", eos=-1),
    generated("eos name", TypeError, r"eos must be an int, got '</s' of str", eos="</s"),
    generated("callback", TypeError, r"callback must be.*of 2 arguments, got one of \(tokens\)",
              callback=lambda tokens: None),
    generated("temperature name", TypeError, r"temperature must be a number, got 'hot' of str",
              temperature="hot"),
    generated("prompt rank", ValueError, r"\[B, T\].*got \(4,\); give.*prompt\[None\]",
              prompt=TOKENS[0]),
    generated("empty prompt", ValueError, r"at least one row and token, got \(2, 0\)",
              prompt=TOKENS[:, :0]),
    generated("lengths", ValueError, r"lengths must be in 1 … 4, got \[0, 4\]; each counts",
              lengths=jnp.array([0, 4])),
    generated("lengths shape", ValueError, r"lengths must have shape \[\*B\] = \(2,\), got \(4,\)",
              lengths=IDS),
    generated("tokens", ValueError, r"max_new_tokens must be at least 1, got 0", max_new_tokens=0),
    generated("capacity", ValueError, r"capacity must be at least 6, the 4.*got 5; raise it",
              capacity=5),
    generated("table", ValueError, r"max_length=5 rows, and 6 tokens are to be read; shorten",
              TABLE),
    generated("temperature", ValueError, r"temperature must be at least 0.*got -1", temperature=-1),
    generated("no rng", ValueError, r"temperature=1.0 needs an rng.*got None", temperature=1.0),
    generated("top_p", ValueError, r"top_p must be in \(0, 1\], got 0", rng=KEY, temperature=1.0,
              top_p=0),
    generated("top_k", ValueError, r"top_k must be at least 1, got 0", rng=KEY, temperature=1.0,
              top_k=0),
    ("top_k", lambda: sampling.top_k(ones(5), 6), ValueError, r"at most the 5 tokens.*got 6; None"),
    generated("top_k for nobody", ValueError, r"top_k=2 and top_p=None limit what is drawn.*set a",
              top_k=2),
    generated("beams", ValueError, r"beams must be at least 1, got 0", beams=0),
    generated("beams drawn", ValueError, r"beams=2 are searched, not drawn", beams=2, rng=KEY,
              temperature=1.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"), [pytest.param(*row, id=name) for name,
     *row in KERNEL + LAYER + MODULES + MODELS]
)  # fmt: skip
def test_message(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}") as raised:
        call()
    assert raised.type is error


def test_under_optimization() -> None:
    """`python -O` removes assertions: no check on a user's input may be one."""
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, __file__, "-k", "test_message", "-W", "ignore::pytest.PytestConfigWarning"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode != 0 or " passed" not in result.stdout:
        pytest.fail(result.stdout[-3000:] + result.stderr[-1000:])
