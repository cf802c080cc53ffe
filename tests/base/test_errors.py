"""Every user mistake raises an error that states the rule, the value and the remedy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import (
    MLP,
    CacheConfig,
    Capture,
    Classifier,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    Experts,
    MultiHeadAttention,
    attention_fn,
    cache,
    dot_product_attention,
    dot_product_attention_weights,
    explain,
    masks,
    positions,
    scores,
    sharding,
)
from flax_mha.cache import KVCache
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding, Translator
from flax_mha.models.decoding import with_caches
from flax_mha.models.generation import generate
from flax_mha.positions import PositionEmbedding, Rotary

KEY = jax.random.key(0)


def ones(*shape: int, dtype: Any = jnp.float32) -> np.ndarray:
    """Return ones of NumPy: JAX would compile a program for each while tests are collected."""
    return np.ones(shape, np.int32 if dtype is int else dtype)


IDS = jax.device_put(np.arange(4, dtype=np.int32))
SPEC = jax.ShapeDtypeStruct((2, 4, 6, 8), jnp.float32)
X = ones(2, 4, 8)  # [B, T, D]
Q = ones(2, 4, 6, 8)  # [B, T, N, H]
TOKENS = ones(2, 4, dtype=int)
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
    """Return cases for one call of dot_product_attention and the same call of explain."""
    qkv = qkv + (Q,) * (3 - len(qkv))
    return [
        (f"attention: {name}", lambda: dot_product_attention(*qkv, **call), error, message),
        (f"explain: {name}", lambda: explain(*qkv, **call), error, message),
    ]


def layer(name: str, error: type[Exception], message: str, *inputs: Any, **fields: Any) -> Case:
    """Return the case of one initialization of the layer. `call` holds the arguments of its
    call.
    """
    call = fields.pop("call", {})
    build = MultiHeadAttention(**{"num_heads": 2} | fields)
    return module(f"layer: {name}", error, message, build, *(inputs or (X,)), **call)


def module(
    name: str, error: type[Exception], message: str, build: nn.Module, *inputs: Any, **call: Any
) -> Case:
    # Traced, not run: every check happens before anything is computed.
    init = partial(build.init, KEY, **call)
    return name, lambda: jax.eval_shape(init, *inputs), error, message


class Empty(scores.ScoreMod):
    pass


KERNEL: list[Case] = [
    *kernel("rank 2", ValueError, r"must have shapes \[\*B, T, N, H\].*\(4, 8\), .*; split", X[0]),
    *kernel("groups", ValueError, r"must divide num_heads=6, got 4",
            Q, Q[:, :, :4], Q[:, :, :4]),
    *kernel("integers", TypeError, r"q must be floating point, got int32; .*cast",
            Q.astype(np.int32)),
    *kernel("float8", TypeError, r"q must have at least 16 bits a number, got float8_e4m3fn.*scale",
            *[Q.astype(jnp.float8_e4m3fn)] * 3),
    *kernel("complex", TypeError, r"k must be floating point, got complex64",
            Q, Q.astype(jnp.complex64)),
    *kernel("numeric mask", ValueError,
            r"of bools, or of 1 \(may attend\) and 0, got -0.5 in float32; compare.*bias=",
            mask=-0.5 * ones(4, 4)),
    *kernel("mask shape", ValueError,
            r"broadcast to \[\*B, N, T, S\] = \(2, 6, 4, 4\), got \(2, 4, 4\); "
            r".*mask\[\.\.\., None", mask=ones(2, 4, 4, dtype=bool)),
    *kernel("mask class", TypeError, r"Mask or a bool array, got <class", mask=masks.Causal),
    *kernel("bias shape", ValueError, r"bias must broadcast.*got \(3, 1, 1\); .*bias\[",
            bias=ones(3, 1, 1)),
    *kernel("bias dtype", TypeError, r"bias must be floating point, got int32", bias=IDS),
    *kernel("rate 1", ValueError, r"dropout_rate must be in \[0, 1\), got 1.0; 0 turns",
            dropout_rate=1.0),
    *kernel("no rng", ValueError, r"=0.5 needs a dropout_rng, got None; give", dropout_rate=0.5),
    layer("qk_norm: a name", TypeError, r"qk_norm must be a QKNorm or None, got 'rmsnorm' of str",
          qk_norm="rmsnorm"),
    layer("order: a token twice", ValueError,
          r"order must be a permutation of 0 … 3, got \[0, 0, 1, 2\]; give each position once",
          call={"order": [0, 0, 1, 2]}),
    layer("order: decoding", ValueError, "got it in decoding or with inputs_k; leave it out",
          decode=True, call={"order": IDS}),
    layer("decoding: more keys than queries", ValueError,
          r"appends a key for each query, got 4 queries and 3 keys; give kv=cache.Encoded\(inp",
          X, X[:, :3], decode=True),
    layer("encoded: beside inputs_k", ValueError, "got inputs_k or inputs_v .*; give one",
          X, X, call={"kv": cache.Encoded(X)}),
    ("zigzag", lambda: sharding.zigzag(12, 4), ValueError,
     "2 pieces on each of 4 devices, got 12 tokens; pad them to a multiple of 8"),
    ("balanced: rows", lambda: sharding.balanced([[8, 8], [8, 9]], 4), ValueError,
     r"the same multiple of .*, got \[16, 17\]; add a document"),
    *kernel("Lengths before the call", ValueError,
            r"Lengths.q counts queries from position 0.*, got \[4\] and positions from 8; add",
            mask=masks.Causal() & masks.Lengths(12, 4), q_positions=8),
    *kernel("positions", ValueError, r"q_positions must.*\(4,\).*got \(3,\); give one",
            q_positions=IDS[:3]),
    *kernel("capture heads", ValueError, r"Capture.heads must be in \[-6, 6\), got \(0, 6\)",
            capture=Capture(("lse",), heads=(0, 6))),
    *kernel("unknown", ValueError, r"'auto' or one of \[.*'reference'.*got 'flash'",
            kernel="flash"),
    *kernel("Lengths shape", ValueError,
            r"Lengths.kv must.*\(2,\) or \[\*B, T\] = \(2, 4\), got \(3,\); "
            r"give one", mask=masks.Lengths(IDS[:3])),
    *kernel("mask of keys", ValueError,
            r"got \(2, 3\); give a mask of keys.*masks.Keys\(mask\)",
            Q, Q[:, :3], Q[:, :3], mask=ones(2, 3, dtype=bool)),
    *kernel("runs of keys of their own", ValueError, r"Segments.kv must be None with",
            mask=masks.Segments(np.arange(4), np.arange(4), runs=True)),
    *kernel("ids beyond int32", ValueError, r"Segments.q must be in -2147483648 … 2147483647",
            mask=masks.Segments(np.array([0, 1, 2, 2**32]))),
    *kernel("cap inf", ValueError, r"SoftCap.cap must be finite, got inf",
            scores=(scores.SoftCap(float("inf")),)),
    *kernel("scale by head", ValueError, r"scale must be one number, got an array of shape \(6,\)",
            scale=ones(6)),
    *kernel("rng", TypeError, r"dropout_rng must be one JAX key, got 0 of int; give jax.random.key",
            dropout_rate=0.5, dropout_rng=0),
    *kernel("sparse blocks", ValueError,
            r"\(2, 6, 2, 1\), got \(4, 1\); give 2 blocks of 2 of the 4 queries",
            mask=masks.BlockSparse([[0]] * 4, 2, 2)),
    *kernel("a bias of no module", TypeError, "table must be an array",
            scores=(scores.RelativeBias(),)),
    ("attention: distances beyond the last bucket", lambda: dot_product_attention(
        Q, Q, Q, scores=(scores.RelativeBias(ones(6, 32), max_distance=8),)), ValueError,
     r"max_distance must exceed 8, .* got 8; raise"),
    *kernel("one score", TypeError, r"a sequence of .*, got SoftCap\(.* with the comma",
            scores=scores.SoftCap(50.0)),
    ("masks: and", lambda: masks.Causal() and masks.Lengths(IDS), TypeError,
     r"neither true nor false.*joined by &, \| and ~, not by and.*write Causal\(\) & Lengths"),
    ("masks: & None", lambda: masks.Causal() & None, TypeError,
     r"got None; give .* skip None by masks.combine\(a, b\)"),
    *kernel("sinks", ValueError,
            r"sinks must have shape \[N\] = \(6,\), got \(3,\)", sinks=ones(3)),
    *kernel("an empty score", NotImplementedError, "",
            scores=(Empty(),)),
    *kernel("axes of a lattice", ValueError,
            r"to the sizes \(2, 2\) for each axis, got \(1,\)",
            mask=masks.Neighborhood((2, 2), (1,))),
    *kernel("ids of fewer tokens", ValueError,
            r"Segments.q must broadcast to \[\*B, T\] = \(2, 4\), got \(3,\); give one number for",
            mask=masks.Segments(np.arange(3))),
    *kernel("documents of a negative length", ValueError,
            r"Documents.lengths must be at least 0, got -2; a length counts tokens",
            mask=masks.Documents([3, -2])),
    ("rotary: integers", lambda: Rotary()(TOKENS[..., None, None], IDS), TypeError,
     r"x must be floating point, got int32"),
]  # fmt: skip

LAYER: list[Case] = [
    layer("positions for nobody", ValueError, r"rotary is None; set it.*or drop positions",
          call={"positions": IDS}),
    layer("an argument of Flax", TypeError, r"only out_sharding=None, got P.*; set nn.logical",
          call={"out_sharding": jax.P()}),
    layer("heads", ValueError, r"num_heads=3 must divide.*got 8; set head_dim", num_heads=3),
    layer("attention_fn: sinks", ValueError, r"sinks needs a kernel of flax_mha.*leave out one",
          attention_fn=nn.dot_product_attention, sinks=True),
    layer("attention_fn: no mask", TypeError, r"unexpected keyword argument 'mask'",
          attention_fn=lambda q, k, v: q, mask=masks.Causal()),
    layer("a field of Flax", TypeError, r"only qkv_dot_general=None, got function; keep Flax's",
          qkv_dot_general=jax.lax.dot_general),
    ("attention_fn: einsum", lambda: attention_fn(Q, Q, Q, qk_attn_weights_einsum=jnp.einsum),
     TypeError, r"only qk_attn_weights_einsum=None, got function; keep Flax's function"),
    *[(f"weights: {name}", lambda name=name: dot_product_attention_weights(Q, Q, **{name: max}),
       TypeError, rf"takes only {name}=None, got builtin.*; keep Flax's function")
      for name in ("einsum", "einsum_dot_general")],
    layer("lengths rows", ValueError, r"lengths must have shape \[\*B\] = \(2,\), got \(4,\); give",
          call={"lengths": IDS}),
    layer("lengths too long", ValueError, r"lengths must be in 0 … 4, got 5; each counts",
          call={"lengths": np.array([3, 5])}),
    layer("dtype int", TypeError, r"dtype must be a floating dtype .*, got int32", dtype=jnp.int32),
    ("cache: rows", lambda: KVCache.empty((2,), 4, 6, 8).fork(ones(2)), TypeError,
     r"rows must be integers, got float32; cast"),
    layer("cache: ring", ValueError,
          r"CacheConfig.slots=4 keeps the last 4.*got mask=Causal\(\); give mask=.*W at most 3",
          decode=True, cache=CacheConfig(slots=4), mask=masks.Causal()),
    *[(f"cache config: {name}", lambda name=name: CacheConfig(name), TypeError,
       rf"CacheConfig.dtype must be a floating dtype .* or int8 or float8_e4m3fn.*, got {name}")
      for name in ("int32", "float8_e4m3fnuz", "float8_e8m0fnu")],
    ("capture: no name", lambda: Capture(("entropies",)), ValueError,
     r"tuple of names out of \('q',.*got \('entropies',\)"),
    ("cache: window", lambda: KVCache.empty((2,), 4, 6, 8, window=4), ValueError,
     r"needs at least 5 slots, got 4; give"),
    ("cache: a ring's mask", lambda: jax.eval_shape(
        lambda: KVCache.empty((2,), 8, 6, 8, window=4).extend(Q, Q, Q, mask=ones(4, 8) > 0)),
     ValueError, r"slots are not positions.*got one; give rules"),
    ("cache: free", lambda: cache.free({}), ValueError, "have the cache of a layer.*give var"),
    layer("positions", ValueError,
          r"positions must have shape \[T\] = \(4,\).*got \(5,\); give one",
          rotary=Rotary(), call={"positions": jnp.arange(5)}),
    layer("head mask", ValueError,
          r"head_mask must have.*\(2,\) or \[\*B, N\] = \(2, 2\), got \(4,\)",
          call={"head_mask": ones(4)}),
    layer("head mask complex", TypeError, r"head_mask must be real, got complex64; take its abs",
          call={"head_mask": ones(2, dtype=jnp.complex64)}),
    layer("values without keys", ValueError, r"inputs_v needs inputs_k, got None; .*as inputs_k", X,
          None, X),
    layer("no deterministic", ValueError, r'"deterministic" must be passed', dropout_rate=0.5),
    layer("learned scale", ValueError,
          r"scale must be a number or 'learned', got 'own'", scale="own"),
    layer("use_bias of none", ValueError, r"names of projections, of \['query', .*got \('q',\)",
          use_bias=("q",)),
    *[layer(f"{name} of 8 bits", TypeError, rf"{name} must be .* with at least 16 bits a "
            r"number, got float8_e4m3fn; give jnp.bfloat16", **{name: jnp.float8_e4m3fn})
      for name in ("dtype", "param_dtype")],
]  # fmt: skip

MODULES: list[Case] = [
    ("rotary: odd", lambda: positions.rotary(Q[..., :3], IDS), ValueError, r"even.*H=3; choose"),
    module("position: beyond the table", ValueError,
           r"positions must be in 0 … 3, got 4; raise max_length",
           PositionEmbedding(), X, positions=np.array([0, 1, 2, 4])),
    *[("position: beyond the table",
       lambda at=at: PositionEmbedding(max_length=6).init(KEY, X, jnp.array([0, 1, 2, at])),
       ValueError, rf"positions must be in 0 … 5, got {at}; raise max_length") for at in (-1, 6)],
    module("block: ints", TypeError, r"x must be floating point, got int32; embed", BLOCK,
           X.astype(int)),
    module("encoder: list", TypeError, r"x must be an array, got list; convert", ENCODER, [[1.0]]),
    module("mlp: None", TypeError, r"x must be an array, got NoneType", MLP(4), None),
    module("language model: a misspelled argument", TypeError,
           "MultiHeadAttention takes no lenghts; give one of", MODEL, TOKENS, lenghts=IDS),
    module("classifier: pooling", ValueError,
           r"pooling must be one of \['first', 'first_and_mean', 'mean'\]",
           Classifier(EMBED, ENCODER, 3, pooling="both"), TOKENS),
    module("language model: at", ValueError, r"at must be in 0 … 3, got 4; each", MODEL,
           TOKENS, at=np.array([1, 4])),
    module("experts: more than there are", ValueError,
           r"top_k=3 must be at most 2, the", Experts(4, 2, 3), X),
    module("experts: more than in the groups", ValueError,
           r"top_k=3 must be at most 2, the experts of the chosen groups; lower",
           Experts(4, 8, 3, groups=4, top_groups=1), X),
    *(
        module(f"no deterministic: {type(build).__name__}", ValueError,
               r"deterministic must be a bool with dropout_rate=0.5, got None; give",
               build, *given)
        for build, *given in (
            (Encoder(1, EncoderBlock(ATTENTION, 16, dropout_rate=0.5), scan=True), X),
            (LanguageModel(EMBED, Decoder(1, DecoderBlock(ATTENTION, 16)), dropout_rate=0.5),
             TOKENS),
        )
    ),
    module("block: attention", TypeError,
           r"attention must be a flax_mha.MultiHeadAttention, got Multi.*build",
           EncoderBlock(nn.MultiHeadDotProductAttention(2), 16), X),
    module("block: features", ValueError,
           r"keep the shape.*\(2, 4, 8\).*got \(2, 4, 6\); leave out_f",
           EncoderBlock(MultiHeadAttention(2, out_features=6), 16), X),
    *[("tokens: no such id", lambda i=i: EMBED.init(KEY, jnp.array([[0, i]])), ValueError,
       rf"tokens must be in 0 … 4, got {i}; raise vocab_size, or map") for i in (-1, 5)],
    ("sharding.of: no mesh", lambda: sharding.of(ATTENTION.init, KEY, X), ValueError,
     r"need a mesh.*got none; wrap in"),
]  # fmt: skip


def generated(
    name: str, error: type[Exception], message: str, model: Any = MODEL, prompt: Any = TOKENS,
    **call: Any,
) -> Case:  # fmt: skip
    """Return the case of one call of generate. Nothing is compiled, so no variables are needed."""
    call = {"max_new_tokens": 3, "variables": {"params": {}}} | call
    return f"generate: {name}", lambda: generate(model, prompt=prompt, **call), error, message


MODELS: list[Case] = [
    module("decoder block: memory for nobody", ValueError,
           r"memory and memory_lengths are for cross_attention, which is None; set",
           DecoderBlock(ATTENTION, 16), X, X),
    module("decoder block: no memory", ValueError, r"has kept, got none; give Encoded\(", CROSS,
           X),
    module("decoder block: one layer twice", ValueError, r"must be two modules.*layer.copy\(\)",
           DecoderBlock(ATTENTION, 16, cross_attention=ATTENTION), X, X),
    ("language model: positions", lambda: jax.eval_shape(lambda: with_caches(TABLE).apply(
        with_caches(TABLE).init(KEY, TOKENS), TOKENS[:, :1], mutable=["cache"])), ValueError,
     r"positions must be given for position_embedding in decoding"),
    generated("model", ValueError, r"must be a LanguageModel or a Tran.*got Encoder", ENCODER),
    generated("start", ValueError, r"got start=None for a Translator; give it", TRANSLATOR),
    generated("start for nobody", ValueError, r"got start=1 for a LanguageModel; drop it", start=1),
    module("language model: a row past the end", ValueError, r"at must be in 0 … 3, got 4", MODEL,
           TOKENS, at=jax.device_put(np.array([0, 4]))),
    module("language model: one number", ValueError, r"at must have shape \[\*B\] = \(2,\), got",
           MODEL, TOKENS, at=1),
    module("language model: no numbers", TypeError, r"at must be integers, got object", MODEL,
           TOKENS, at=[None, None]),
    *[generated("prompt's ids", ValueError, rf"prompt must be in 0 … 4, got {i}; give ids of",
                prompt=np.where(np.arange(8).reshape(2, 4) == 6, i, TOKENS)) for i in (-1, 5)],
    generated("eos", ValueError, r"eos must be in 0 … 4, got 5", eos=5),
    generated("rng", TypeError, r"rng must be one JAX key, got 0 of int; give", rng=0,
              temperature=1.0),
    generated("prompt rank", ValueError, r"\[B, T\].*got \(4,\); give.*prompt\[None\]",
              prompt=TOKENS[0]),
    generated("empty prompt", ValueError, r"at least one row and token, got \(2, 0\)",
              prompt=TOKENS[:, :0]),
    generated("capacity", ValueError, r"capacity must have room for 6 tokens, the 4.*got 5; enl",
              capacity=5),
    ("generate: table", lambda: jax.eval_shape(
        lambda: generate(TABLE, TABLE.init(KEY, TOKENS), TOKENS, max_new_tokens=3)), ValueError,
     r"positions must be in 0 … 4, got 5; raise max_length"),
    generated("temperature", ValueError, r"temperature must be at least 0.*got -1", temperature=-1),
    generated("no rng", TypeError, r"rng must be .* got None", temperature=1.0),
    generated("top_k for nobody", ValueError, r"top_k, top_p and min_p must .* got 2, None and N",
              top_k=2),
    generated("early_stopping", ValueError, r"must be True, False or 'never', got 'always'",
              beams=2, early_stopping="always"),
    generated("length_penalty alone", ValueError, r"must be left out with beams=1, got .* 1.0",
              length_penalty=1.0),
    generated("cache of a module", ValueError,
              r"without cache=.* got LanguageModel and a cache of dict",
              cache={}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"), [pytest.param(*row, id=name) for name,
     *row in KERNEL + LAYER + MODULES + MODELS]
)  # fmt: skip
def test_mistake_raises_rule_value_and_remedy(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}") as raised:
        call()
    assert raised.type is error
