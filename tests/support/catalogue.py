"""All public layers, blocks, models, masks, scores and samplers, for laws that hold for each."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_mha.nnx as ours
from flax_mha import (
    MLP,
    Classifier,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    Experts,
    LanguageModel,
    MultiHeadAttention,
    MultiHeadDotProductAttention,
    QKNorm,
    SelfAttention,
    Translator,
    masks,
    models,
    sampling,
    scores,
    variants,
)  # fmt: skip
from flax_mha.positions import PositionEmbedding, Rotary
from tests.masks.catalogue import MASKS, Scene
from tests.scores.catalogue import SCORES

T, D, N = 16, 16, 2
# Token 0 is more than half of the text.
TOKENS = np.arange(T, dtype=np.int32) % 5 * (np.arange(T) > 9)
_RNG = np.random.default_rng(0)
INPUTS: dict[str, tuple[np.ndarray, ...]] = {
    "features": (_RNG.normal(size=(T, D)),),
    "memory": tuple(_RNG.normal(size=(2, T, D))),
    "tokens": (TOKENS,),
    "two texts": (TOKENS, TOKENS[::-1]),
    "image": (_RNG.normal(size=(8, 8, 3)),),
}


class Entry(NamedTuple):
    """A public name at work.

    Attributes:
      value: the class or function that the name stands for.
      make: a function from `dtype` and `param_dtype` to a module; None for a function of logits.
      inputs: the name of the module's inputs.
    """

    value: Any
    make: Callable[..., Any] | None
    inputs: str = "features"

    def arrays(self, rows: int, dtype: Any) -> list[jax.Array]:
        """Return the inputs, with equal rows [rows, …]."""
        arrays = (np.broadcast_to(x, (rows, *x.shape)) for x in INPUTS[self.inputs])
        return [jnp.asarray(x, dtype if x.dtype == np.float64 else x.dtype) for x in arrays]

    def opened(self, dtype: Any, param_dtype: Any) -> tuple[Any, Callable[..., Any]]:
        """Return the parameters, and a function of them and the inputs."""
        assert self.make is not None
        if isinstance(self.value, type) and issubclass(self.value, nnx.Module):
            graph, params = nnx.split(self.make(dtype=dtype, param_dtype=param_dtype), nnx.Param)
            return params, lambda params, *inputs: nnx.merge(graph, params)(*inputs)
        module = self.make(dtype=dtype, param_dtype=param_dtype)
        variables = jax.jit(module.init)(jax.random.key(0), *self.arrays(1, dtype))
        return nn.unbox(variables["params"]), lambda params, *inputs: module.apply(
            {"params": params}, *inputs
        )


class _Masked(nn.Module):
    """A layer whose heads have learned factors."""

    layer: nn.Module

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x, head_mask=self.param("head_mask", nn.initializers.ones, (N,)))


def _layer(**fields: Any) -> Callable[..., nn.Module]:
    return functools.partial(MultiHeadAttention, N, **fields)


def _block(**fields: Any) -> Callable[..., EncoderBlock]:
    return lambda **dtypes: EncoderBlock(_layer()(**dtypes), 32, **fields)


def _decoder(cross: bool = False, **dtypes: Any) -> Decoder:
    memory = MultiHeadAttention(N, **dtypes) if cross else None
    layer = MultiHeadAttention(N, num_kv_heads=1, rotary=Rotary(), **dtypes)
    return Decoder(1, DecoderBlock(layer, 32, norm="rmsnorm", gated=True, cross_attention=memory))


def _table(**dtypes: Any) -> models.TokenEmbedding:
    return models.TokenEmbedding(7, D, **dtypes)


def _language_model(cross: bool = False, **dtypes: Any) -> LanguageModel:
    return LanguageModel(_table(**dtypes), _decoder(cross, **dtypes))


def _of(kind: Any, *args: Any, inputs: str = "features", **fields: Any) -> Entry:
    return Entry(kind, functools.partial(kind, *args, **fields), inputs)


def _nnx(name: str, **fields: Any) -> Entry:
    kind = getattr(ours, name)
    return Entry(kind, lambda **dtypes: kind(N, D, rngs=nnx.Rngs(0), **fields, **dtypes))


_VARIANTS: dict[str, dict[str, Any]] = {
    "ChosenBlocksAttention": {"block": 2, "count": 2},
    "DifferentialAttention": {},
    "ForgettingAttention": {},
    "MultiHeadLatentAttention": {
        "head_dim": 4, "kv_rank": 6, "rope_dim": 2, "q_rank": 5, "rotary": Rotary(),
    },
    "TalkingHeadsAttention": {},
}  # fmt: skip


def parts_of(mask: masks.Mask) -> Iterator[masks.Mask]:
    """Yield a mask, and the masks that it is made of."""
    yield mask
    inner = getattr(mask, "masks", ()) or [getattr(mask, "mask", None)]
    for part in inner:
        if isinstance(part, masks.Mask):
            yield from parts_of(part)


def examples(at: Scene) -> dict[str, Any]:
    """Return an instance of each public class of masks and scores, from their catalogues."""
    every: list[Any] = [row.of_layer(at) for row in SCORES.values()]
    every += [part for make in MASKS.values() for part in parts_of(make(at)[0])]
    public = {*masks.__all__, *scores.__all__}
    return {name: x for x in every if (name := type(x).__name__) in public}


CATALOGUE: dict[str, Entry] = {
    "layer": _of(MultiHeadAttention, N),
    "head mask": Entry(MultiHeadAttention, lambda **dtypes: _Masked(_layer()(**dtypes))),
    "layer of all options": Entry(
        MultiHeadAttention,
        _layer(
            num_kv_heads=1, qk_norm=QKNorm("layernorm"), sinks=True, scale="learned", gate="head"
        ),
    ),
    "Flax's layer": _of(MultiHeadDotProductAttention, N),
    "Flax's self-attention": _of(SelfAttention, N),
    "MLP": _of(MLP, 32),
    "gated MLP": _of(MLP, 32, "silu", True),
    "experts": _of(Experts, 8, 4, 2, use_bias=True, shared=8),
    "encoder block": Entry(EncoderBlock, _block(layer_scale=0.5, output_scale=0.5)),
    "parallel block": Entry(EncoderBlock, _block(norm="rmsnorm", parallel=True, branch_norm=True)),
    "decoder block": Entry(
        DecoderBlock, lambda **dtypes: _decoder(True, **dtypes).blocks[0].clone(), "memory"
    ),
    "encoder": Entry(Encoder, lambda **dtypes: Encoder(2, _block()(**dtypes), scan=True)),
    "decoder": Entry(Decoder, lambda **dtypes: _decoder(True, **dtypes), "memory"),
    "classifier": Entry(
        Classifier,
        lambda **dtypes: Classifier(
            models.PatchEmbedding(2, D, norm_epsilon=1e-5, **dtypes),
            Encoder(1, _block()(**dtypes)), 8, class_tokens=1, register_tokens=1,
        ),
        "image",
    ),
    "language model": Entry(LanguageModel, _language_model, "tokens"),
    "translator": Entry(
        Translator,
        lambda **dtypes: Translator(
            Encoder(1, _block()(**dtypes)), _language_model(True, **dtypes)
        ),
        "two texts",
    ),
    "token embedding": Entry(models.TokenEmbedding, _table, "tokens"),
    "patch embedding": _of(models.PatchEmbedding, 2, D, inputs="image"),
    "position embedding": _of(PositionEmbedding),
    "nnx layer": _nnx("MultiHeadAttention", gate="feature", sinks=True),
    **{name: _of(getattr(variants, name), N, **fields) for name, fields in _VARIANTS.items()},
    **{f"nnx {name}": _nnx(name, **fields) for name, fields in _VARIANTS.items()},
    **{
        name: Entry(type(x), _layer(mask=x) if hasattr(masks, name) else _layer(scores=(x,)))
        for name, x in examples(Scene((), T, T, N=N)).items()
    },
    # All rows must be alike, so functions of users do not read which row it is.
    "Predicate": Entry(
        masks.Predicate, _layer(mask=masks.Predicate(lambda row, head, i, j: i >= j))
    ),
    "Score": Entry(
        scores.Score, _layer(scores=(scores.Score(lambda score, row, head, i, j: score + 1),))
    ),
    **{x.__name__: Entry(x, None) for x in (sampling.top_k, sampling.top_p, sampling.min_p)},
}  # fmt: skip
