"""The programs of `measure compiled` and `measure timed`, by this package, by Flax, and by hand.

| program | computation |
|---|---|
| `layer` | a layer, B=4, T=4,096, D=2,048, 16 heads of 128, causal |
| `layer-64`, `layer-96`, `layer-192` | the same with 32 heads of 64, 20 of 96 or 10 of 192 |
| `rotary` | `layer` with rotary positions |
| `grouped` | the same with 4 key/value heads and norms of queries and keys |
| `arrays` | a layer under Flax's arrays of masks, B=8, T=1,024, D=1,024, 16 heads of 64 |
| `short` | a layer of a vision transformer, B=64, T=197, D=768, 12 heads of 64, no mask |
| `decode` | a step of one token in a layer with a cache of S=8,192, B=8, D=2,048, 16 heads of 128 |
| `decode-grouped` | the same with 4 key/value heads |
| `decode-narrow` | the same as `decode` with 20 heads of 96 |
| `decode-64` | the same as `decode`, of 64 tokens |
| `decode-model` | a step of one token in a model of 4 layers, each with 8 key/value heads |
| `decode-scan` | the same by a scan |
| `model` | a language model of 12 layers by a scan, B=4, T=2,048, D=1,024, 16 heads of 64 |
| `unrolled` | the same without a scan |

Layers are compiled forward and with the gradients of parameters and input, and the model with its
loss and gradient, for a vocabulary of 32,768. All compute in bfloat16 with a float32 softmax.
Parameters are float32, but bfloat16 where a token is decoded. The arrays are causal and padding.
"""

import argparse
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flax_mha
from experiments.common import command
from experiments.measure import by_hand
from flax_mha import Decoder, DecoderBlock, LanguageModel, masks, positions
from flax_mha.models import TokenEmbedding

HALF = jnp.bfloat16
SLOTS = 8192  # of the caches
# The contestants of a program by name: "hand", "ours", "flax", or "tokamax", which is by hand with
# its kernel for TPUs. Each is a function and the shapes of its arguments.
Contestants = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


class Entry(NamedTuple):
    """One program of a contestant.

    Attributes:
      program: its name in the table above.
      contestant: its name.
      passes: "forward", "gradient", or "step", whose result replaces its first argument, a cache.
      function: the function, of `arguments`.
      arguments: the shapes of its arguments.
    """

    program: str
    contestant: str
    passes: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Chip(NamedTuple):
    """A device to compile for."""

    device: jax.Device
    is_gpu: bool

    @property
    def mesh(self) -> Mesh:
        """A mesh of the device."""
        return Mesh(np.array([self.device]), ("device",))

    def place(self, tree: Any) -> Any:
        """Return the shapes of a tree's arrays, on the device."""
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), nn.unbox(tree)
        )

    def array(self, *shape: int, dtype: Any = HALF) -> Any:
        """Return the shape of an array on the device."""
        return self.place(jax.ShapeDtypeStruct(shape, dtype))

    def weights(self, dtype: Any = jnp.float32, **shapes: Sequence[int]) -> dict[str, Any]:
        """Return the shapes of named arrays on the device."""
        return {name: self.array(*shape, dtype=dtype) for name, shape in shapes.items()}

    def initial(self, module: Any, *inputs: Any) -> Any:
        """Return the shapes of a module's variables on the device."""
        return self.place(jax.eval_shape(module.init, jax.random.key(0), *inputs))


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names programs, and their table to the help."""
    parser.add_argument("--programs", type=command.among([*PROGRAMS]), default=[*PROGRAMS],
                        metavar="NAME,…", help="programs to take (default: all)")  # fmt: skip
    parser.description = f"{parser.description}\n\n{(__doc__ or '').partition(chr(10))[2].strip()}"


def entries(chip: Chip, names: Sequence[str]) -> Iterator[Entry]:
    """Yield the programs of some names, contestant by contestant, the one by hand first."""
    for name in names:
        for contestant, (function, arguments) in PROGRAMS[name](chip).items():
            if name.startswith("decode"):
                passes = {"step": function}
            elif name in ("model", "unrolled"):
                passes = {"gradient": function}
            else:
                passes = {"forward": function, "gradient": jax.grad(loss(function), (0, 1))}
            for kind, each in passes.items():
                run = by_hand.cross_compiled(each) if contestant == "tokamax" else each
                yield Entry(name, contestant, kind, run, arguments)


def fill(arguments: Sequence[Any], position: int = -1) -> list[Any]:
    """Return random arguments of some shapes, on the device that is here.

    Integers are tokens, and the last eighth of a sequence is padding. If a `position` is given, the
    first argument is a cache, whose tokens end there.
    """
    leaves, tree = jax.tree.flatten(list(arguments))
    cached = 0 if position < 0 else len(jax.tree.leaves(arguments[0]))

    def filled(n: int, x: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return (0.05 * jax.random.normal(jax.random.key(n), x.shape, HALF)).astype(x.dtype)
        if n < cached:
            return jnp.full(x.shape, position if x.ndim < 3 else 1, x.dtype)
        tokens = jax.random.randint(jax.random.key(n), x.shape, 1, 1000, x.dtype)
        return tokens.at[..., -(x.shape[-1] // 8) :].set(0)

    return list(jax.tree.unflatten(tree, [filled(n, x) for n, x in enumerate(leaves)]))


def loss(apply: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Return the function of the same arguments to the mean square of its result."""

    def mean_square(*arguments: Any) -> jax.Array:
        return (apply(*arguments).astype(jnp.float32) ** 2).mean()

    return mean_square


def _projections(D: int, N: int, K: int, H: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices of a layer by hand, for heads of H features or D/N."""
    H = H or D // N
    return {"q": (D, N, H), "k": (D, K, H), "v": (D, K, H), "o": (N, H, D)}


def _long(
    chip: Chip, K: int | None = None, rotates: bool = False, normalizes: bool = False,
    N: int = 16, H: int = 128,
) -> Contestants:  # fmt: skip
    B, T, D, K = 4, 4096, 2048, K or N
    x = chip.array(B, T, D)
    ours = flax_mha.MultiHeadAttention(
        N, num_kv_heads=K, head_dim=H, dtype=HALF, use_bias=False, mask=masks.Causal(),
        rotary=positions.Rotary() if rotates else None, normalize_qk=normalizes,
    )  # fmt: skip
    w = chip.weights(**_projections(D, N, K, H))
    if normalizes:
        w |= chip.weights(q_scale=(H,), k_scale=(H,))

    def hand(attend: by_hand.Attend, heads_first: bool) -> Any:
        return functools.partial(by_hand.layer, attend, heads_first, rotates, normalizes), (w, x)

    best = hand(*((by_hand.cudnn(H), False) if chip.is_gpu else (by_hand.splash(T, N, H), True)))
    found = {"hand": best, "ours": (ours.apply, (chip.initial(ours, x), x))}
    if not chip.is_gpu and importlib.util.find_spec("tokamax"):
        found["tokamax"] = hand(by_hand.tokamax, False)
    return found


def _arrays(chip: Chip) -> Contestants:
    def mask(tokens: jax.Array) -> Any:
        return nn.combine_masks(
            nn.make_causal_mask(tokens, dtype=bool),
            nn.make_attention_mask(tokens > 0, tokens > 0, dtype=bool), dtype=bool,
        )  # fmt: skip

    def hand(w: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
        seen = mask(tokens)
        if chip.is_gpu:
            attend = by_hand.cudnn(64, jnp.where(seen, 0, -1e30).astype(HALF))
        else:
            attend = by_hand.einsum(seen)
        return by_hand.layer(attend, False, False, False, w, x)

    x, tokens = chip.array(8, 1024, 1024), chip.array(8, 1024, dtype=jnp.int32)
    return _layers(chip, 16, hand, mask, x, tokens)


def _short(chip: Chip) -> Contestants:
    hand = functools.partial(by_hand.layer, by_hand.einsum(), False, False, False)
    return _layers(chip, 12, hand, lambda: None, chip.array(64, 197, 768))


def _layers(
    chip: Chip, N: int, hand: Callable[..., Any], mask: Callable[..., Any], x: Any, *more: Any
) -> Contestants:
    """Return a layer by hand, ours and Flax's, without biases, under a mask of some arguments."""
    D = x.shape[-1]
    w = chip.weights(**_projections(D, N, N))
    found: Contestants = {"hand": (hand, (w, x, *more))}
    options: dict[str, Any] = {"dtype": HALF, "use_bias": False}
    layers: dict[str, nn.Module] = {
        "ours": flax_mha.MultiHeadDotProductAttention(N, **options),
        "flax": nn.MultiHeadDotProductAttention(N, force_fp32_for_softmax=True, **options),
    }
    for name, layer in layers.items():

        def apply(v: Any, x: jax.Array, *more: Any, layer: nn.Module = layer) -> Any:
            return layer.apply(v, x, mask=mask(*more))

        found[name] = apply, (chip.initial(layer, x), x, *more)
    return found


def _decode(chip: Chip, K: int = 16, T: int = 1, N: int = 16, H: int = 128) -> Contestants:
    B, S, D = 8, SLOTS, 2048
    w = chip.weights(HALF, **_projections(D, N, K, H))
    cache = chip.weights(HALF, k=(B, K, S, H), v=(B, K, S, H))
    cache["length"] = chip.array(B, dtype=jnp.int32)
    x, whole = chip.array(B, T, D), chip.array(B, S, D)
    hand = functools.partial(by_hand.decoding_step, not chip.is_gpu)
    options: dict[str, Any] = {"dtype": HALF, "param_dtype": HALF, "use_bias": False}
    ours = flax_mha.MultiHeadAttention(N, num_kv_heads=K, head_dim=H, decode=True, **options)
    found = {"hand": (hand, (cache, w, x)), "ours": step(chip, ours, whole, x)}
    if K == N and T == 1:
        flax = nn.MultiHeadDotProductAttention(N, qkv_features=N * H, decode=True, **options)
        found["flax"] = step(chip, flax, whole, x)
    return found


def _decode_model(chip: Chip, scan: bool = False) -> Contestants:
    B, S, D, N = 8, SLOTS, 2048, 16
    attention = flax_mha.MultiHeadAttention(
        N, num_kv_heads=8, dtype=HALF, param_dtype=HALF, use_bias=False,
        rotary=positions.Rotary(), decode=True,
    )  # fmt: skip
    embed = TokenEmbedding(32000, D, dtype=HALF, param_dtype=HALF)
    decoder = Decoder(4, DecoderBlock(attention, mlp_dim=4 * D), scan=scan)
    whole, one = (chip.array(B, T, dtype=jnp.int32) for T in (S, 1))
    return {"ours": step(chip, LanguageModel(embed, decoder), whole, one)}


def step(chip: Chip, module: Any, whole: Any, x: Any) -> Any:
    """Return a program in which a module decodes x, with a cache for the tokens of `whole`."""
    held = chip.initial(module, whole)

    def decode(cache: Any, params: Any, x: jax.Array) -> Any:
        y, new = module.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return y, new["cache"]

    return decode, (held["cache"], held["params"], x)


def _model(chip: Chip, scan: bool = True) -> Contestants:
    L, B, T, D, N, H, F, V = 12, 4, 2048, 1024, 16, 64, 4096, 32768
    tokens = chip.array(B, T + 1, dtype=jnp.int32)

    def gradient(apply: Callable[..., Any], weights: Any) -> Any:
        def loss(weights: Any, tokens: jax.Array) -> jax.Array:
            logits = apply(weights, tokens[:, :-1])
            errors = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return errors.mean()

        return jax.value_and_grad(loss), (weights, tokens)

    w: dict[str, Any] = chip.weights(table=(V, D), norm=(D,))
    shapes = _projections(D, N, N)
    shapes |= {"up": (D, F), "down": (F, D), "norm": (D,), "mlp_norm": (D,)}
    stacked = {name: (L, *shape) for name, shape in shapes.items()}
    w["layers"] = chip.weights(**stacked) if scan else [chip.weights(**shapes)] * L
    attend = by_hand.cudnn(H) if chip.is_gpu else by_hand.splash(T, N, H)
    hand = functools.partial(by_hand.language_model, attend, not chip.is_gpu)
    attention = flax_mha.MultiHeadAttention(N, dtype=HALF, use_bias=False)
    block = DecoderBlock(attention, F, norm="rmsnorm")
    ours = LanguageModel(TokenEmbedding(V, D, dtype=HALF), Decoder(L, block, scan=scan))
    weights = chip.initial(ours, chip.array(B, T, dtype=jnp.int32))
    return {"hand": gradient(hand, w), "ours": gradient(ours.apply, weights)}


PROGRAMS: dict[str, Callable[[Chip], Contestants]] = {
    "layer": _long,
    "layer-64": functools.partial(_long, N=32, H=64),
    "layer-96": functools.partial(_long, N=20, H=96),
    "layer-192": functools.partial(_long, N=10, H=192),
    "rotary": functools.partial(_long, rotates=True),
    "grouped": functools.partial(_long, K=4, rotates=True, normalizes=True),
    "arrays": _arrays,
    "short": _short,
    "decode": _decode,
    "decode-grouped": functools.partial(_decode, K=4),
    "decode-narrow": functools.partial(_decode, K=20, N=20, H=96),
    "decode-64": functools.partial(_decode, T=64),
    "decode-model": _decode_model,
    "decode-scan": functools.partial(_decode_model, scan=True),
    "model": _model,
    "unrolled": functools.partial(_model, scan=False),
}
