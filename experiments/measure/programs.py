"""The programs of `measure compiled` and `measure timed`, by this package, by Flax, and by hand.

| program | computation |
|---|---|
| `layer` | a layer, B=4, T=4,096, D=2,048, 16 heads of 128, causal |
| `rotary` | the same with rotary positions |
| `grouped` | the same with 4 key/value heads and norms of queries and keys |
| `arrays` | a layer under Flax's arrays of masks, B=8, T=1,024, D=1,024, 16 heads of 64 |
| `short` | a layer of a vision transformer, B=64, T=197, D=768, 12 heads of 64, no mask |
| `decode` | a step of one token in a layer with a cache of S=8,192, B=8, D=2,048, 16 heads of 128 |
| `decode-grouped` | the same with 4 key/value heads |
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
from experiments.measure import by_hand
from experiments.runs import command
from flax_mha import Decoder, DecoderBlock, LanguageModel, masks, positions
from flax_mha.models import TokenEmbedding

HALF = jnp.bfloat16
PASSES = ("forward", "gradient")


class Entry(NamedTuple):
    """One program of a contestant.

    Attributes:
      program: its name in the table above.
      contestant: "ours", "flax", "hand", or "tokamax", by hand with its kernel for TPUs, if it is
        installed.
      passes: "forward", "gradient", or "step".
      function: the function, of `arguments`.
      arguments: the shapes of its arguments.
      donated: the indices of arguments that the result replaces.
    """

    program: str
    contestant: str
    passes: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()


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


def entries(chip: Chip, names: Sequence[str]) -> Iterator[Entry]:
    """Yield the programs of some names, contestant by contestant."""
    for name in names:
        yield from PROGRAMS[name](chip, name)


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names programs."""
    every = ",".join(PROGRAMS)
    parser.add_argument("--programs", type=command.among([*PROGRAMS]), default=every, help=every)


def _both(
    name: str, contestant: str, apply: Callable[..., Any], *arguments: Any
) -> Iterator[Entry]:
    """Yield a layer's forward pass, and its gradient in the first two arguments."""

    def loss(*arguments: Any) -> jax.Array:
        return (apply(*arguments).astype(jnp.float32) ** 2).mean()

    for passes, function in zip(PASSES, (apply, jax.grad(loss, (0, 1))), strict=True):
        yield Entry(name, contestant, passes, function, arguments)


def _long(
    chip: Chip, name: str, K: int = 16, rotates: bool = False, normalizes: bool = False
) -> Iterator[Entry]:
    B, T, D, N, H = 4, 4096, 2048, 16, 128
    x = chip.array(B, T, D)
    layer = flax_mha.MultiHeadAttention(
        N, num_kv_heads=K, dtype=HALF, use_bias=False, mask=masks.Causal(),
        rotary=positions.Rotary() if rotates else None, normalize_qk=normalizes,
    )  # fmt: skip
    yield from _both(name, "ours", layer.apply, _initial(chip, layer, x), x)
    w = chip.weights(q=(D, N, H), k=(D, K, H), v=(D, K, H), o=(N, H, D))
    if normalizes:
        w |= chip.weights(q_scale=(H,), k_scale=(H,))
    attend = by_hand.cudnn(H) if chip.is_gpu else by_hand.splash(T, N, H)
    hand = functools.partial(by_hand.layer, attend, not chip.is_gpu, rotates, normalizes)
    yield from _both(name, "hand", hand, w, x)
    if not chip.is_gpu and importlib.util.find_spec("tokamax"):
        hand = functools.partial(by_hand.layer, by_hand.tokamax, False, rotates, normalizes)
        for entry in _both(name, "tokamax", hand, w, x):
            yield entry._replace(function=by_hand.cross_compiled(entry.function))


def _arrays(chip: Chip, name: str) -> Iterator[Entry]:
    B, T, D, N = 8, 1024, 1024, 16
    H = D // N
    x, tokens = chip.array(B, T, D), chip.array(B, T, dtype=jnp.int32)

    def mask(tokens: jax.Array) -> Any:
        return nn.combine_masks(
            nn.make_causal_mask(tokens, dtype=bool),
            nn.make_attention_mask(tokens > 0, tokens > 0, dtype=bool), dtype=bool,
        )  # fmt: skip

    for contestant, layer in _layers(N):

        def apply(v: Any, x: jax.Array, tokens: jax.Array, layer: Any = layer) -> Any:
            return layer.apply(v, x, mask=mask(tokens))

        yield from _both(name, contestant, apply, _initial(chip, layer, x), x, tokens)

    def hand(w: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
        seen = mask(tokens)
        if chip.is_gpu:
            attend = by_hand.cudnn(H, jnp.where(seen, 0, -1e30).astype(HALF))
        else:
            attend = by_hand.einsum(seen)
        return by_hand.layer(attend, False, False, False, w, x)

    yield from _both(name, "hand", hand, _projections(chip, D, N, H), x, tokens)


def _short(chip: Chip, name: str) -> Iterator[Entry]:
    D, N = 768, 12
    x = chip.array(64, 197, D)
    for contestant, layer in _layers(N):
        yield from _both(name, contestant, layer.apply, _initial(chip, layer, x), x)
    hand = functools.partial(by_hand.layer, by_hand.einsum(), False, False, False)
    yield from _both(name, "hand", hand, _projections(chip, D, N, D // N), x)


def _decode(chip: Chip, name: str, K: int = 16, T: int = 1) -> Iterator[Entry]:
    B, S, D, N, H = 8, 8192, 2048, 16, 128
    x = chip.array(B, T, D)
    options: dict[str, Any] = {"dtype": HALF, "param_dtype": HALF, "use_bias": False}
    ours = flax_mha.MultiHeadAttention(N, num_kv_heads=K, decode=True, **options)
    layers: dict[str, nn.Module] = {"ours": ours}
    if K == N and T == 1:
        layers["flax"] = nn.MultiHeadDotProductAttention(N, decode=True, **options)
    for contestant, layer in layers.items():
        yield _step(chip, name, contestant, layer, chip.array(B, S, D), x)
    w = chip.weights(HALF, q=(D, N, H), k=(D, K, H), v=(D, K, H), o=(N, H, D))
    cache = chip.weights(HALF, k=(B, K, S, H), v=(B, K, S, H))
    cache["length"] = chip.array(B, dtype=jnp.int32)
    hand = functools.partial(by_hand.decoding_step, not chip.is_gpu)
    arguments = cache, w, x
    yield Entry(name, "hand", "step", hand, arguments, (0,))


def _decode_model(chip: Chip, name: str, scan: bool = False) -> Iterator[Entry]:
    B, S, D, N = 8, 8192, 2048, 16
    attention = flax_mha.MultiHeadAttention(
        N, num_kv_heads=8, dtype=HALF, param_dtype=HALF, use_bias=False,
        rotary=positions.Rotary(), decode=True,
    )  # fmt: skip
    embed = TokenEmbedding(32000, D, dtype=HALF, param_dtype=HALF)
    decoder = Decoder(4, DecoderBlock(attention, mlp_dim=4 * D), scan=scan)
    whole, one = (chip.array(B, T, dtype=jnp.int32) for T in (S, 1))
    yield _step(chip, name, "ours", LanguageModel(embed, decoder), whole, one)


def _step(chip: Chip, name: str, contestant: str, module: Any, whole: Any, x: Any) -> Entry:
    """Return a step in which a module decodes x, with a cache for the tokens of `whole`."""
    held = _initial(chip, module, whole)

    def step(cache: Any, params: Any, x: jax.Array) -> Any:
        y, new = module.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return y, new["cache"]

    return Entry(name, contestant, "step", step, (held["cache"], held["params"], x), (0,))


def _model(chip: Chip, name: str, scan: bool = True) -> Iterator[Entry]:
    L, B, T, D, N, H, F, V = 12, 4, 2048, 1024, 16, 64, 4096, 32768
    tokens = chip.array(B, T + 1, dtype=jnp.int32)

    def gradient(apply: Callable[..., Any]) -> Callable[..., Any]:
        def loss(weights: Any, tokens: jax.Array) -> jax.Array:
            logits = apply(weights, tokens[:, :-1])
            errors = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return errors.mean()

        return jax.value_and_grad(loss)

    attention = flax_mha.MultiHeadAttention(N, dtype=HALF, use_bias=False)
    block = DecoderBlock(attention, F, norm="rmsnorm")
    ours = LanguageModel(TokenEmbedding(V, D, dtype=HALF), Decoder(L, block, scan=scan))
    weights = _initial(chip, ours, chip.array(B, T, dtype=jnp.int32))
    yield Entry(name, "ours", PASSES[1], gradient(ours.apply), (weights, tokens))
    w: dict[str, Any] = chip.weights(table=(V, D), norm=(D,))
    shapes = {"q": (D, N, H), "k": (D, N, H), "v": (D, N, H), "o": (N, H, D), "up": (D, F),
              "down": (F, D), "norm": (D,), "mlp_norm": (D,)}  # fmt: skip
    stacked = {name: (L, *shape) for name, shape in shapes.items()}
    w["layers"] = chip.weights(**stacked) if scan else [chip.weights(**shapes)] * L
    attend = by_hand.cudnn(H) if chip.is_gpu else by_hand.splash(T, N, H)
    hand = functools.partial(by_hand.language_model, attend, not chip.is_gpu)
    yield Entry(name, "hand", PASSES[1], gradient(hand), (w, tokens))


def _layers(N: int) -> Iterator[tuple[str, Any]]:
    """Yield our layer and Flax's, without biases."""
    yield "ours", flax_mha.MultiHeadDotProductAttention(N, dtype=HALF, use_bias=False)
    yield (
        "flax",
        nn.MultiHeadDotProductAttention(N, dtype=HALF, use_bias=False, force_fp32_for_softmax=True),
    )


def _initial(chip: Chip, module: Any, *inputs: Any) -> Any:
    """Return the shapes of a module's variables on the chip."""
    return chip.place(jax.eval_shape(module.init, jax.random.key(0), *inputs))


def _projections(chip: Chip, D: int, N: int, H: int) -> dict[str, Any]:
    return chip.weights(q=(D, N, H), k=(D, N, H), v=(D, N, H), o=(N, H, D))


PROGRAMS: dict[str, Callable[[Chip, str], Iterator[Entry]]] = {
    "layer": _long,
    "rotary": functools.partial(_long, rotates=True),
    "grouped": functools.partial(_long, K=4, rotates=True, normalizes=True),
    "arrays": _arrays,
    "short": _short,
    "decode": _decode,
    "decode-grouped": functools.partial(_decode, K=4),
    "decode-64": functools.partial(_decode, T=64),
    "decode-model": _decode_model,
    "decode-scan": functools.partial(_decode_model, scan=True),
    "model": _model,
    "unrolled": functools.partial(_model, scan=False),
}
