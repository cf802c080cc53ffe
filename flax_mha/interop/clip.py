"""CLIP and SigLIP: an image encoder and a text encoder, together or alone."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import masks
from flax_mha.base import numerics
from flax_mha.interop import table
from flax_mha.interop.bert import BUFFERS, Bert
from flax_mha.interop.checked_config import REMEDY, Config, FileSettings, filled
from flax_mha.interop.shared_settings import activation, grid, refuse
from flax_mha.interop.vision import block, image
from flax_mha.layer.linear import Projection
from flax_mha.layer.qk_norm import layer_norm
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Classifier, Encoder, PositionEmbedding, TokenEmbedding
from flax_mha.models.feed_forward import MLP

HEADS = ("q_proj", "k_proj", "v_proj", "out_proj")


class ClipTraits(NamedTuple):
    """The properties of a model type.

    Attributes:
      text: the defaults of `text_config`; files leave out settings that equal them.
      vision: the defaults of `vision_config`.
      is_clip: True if a learned token represents the image, and the text encoder is causal;
        otherwise a layer pools.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    is_clip: bool


_SIZES = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768,
          "intermediate_size": 3072}  # fmt: skip
_IMAGES = _SIZES | {"image_size": 224, "num_channels": 3}
_CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
KINDS = {
    "clip": ClipTraits(
        _CLIP | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
                 "num_attention_heads": 8, "vocab_size": 49408, "max_position_embeddings": 77,
                 "eos_token_id": 49407},
        _IMAGES | _CLIP | {"patch_size": 32}, is_clip=True,
    ),
    "siglip": ClipTraits(
        _SIZES | _SIGLIP | {"vocab_size": 32000, "max_position_embeddings": 64},
        _IMAGES | _SIGLIP | {"patch_size": 16}, is_clip=False,
    ),
}  # fmt: skip


class Towers(nn.Module):
    """An image encoder and a text encoder with a common feature space: CLIP, SigLIP.

    Attributes:
      image: the image encoder; without `pool` its first token represents the image.
      text: the text encoder.
      features: the size of the common space; None if the encoders share one already.
      pool: a layer in which one learned query attends to all tokens of an image (SigLIP).
      biased: True if the logits have a learned bias.
      token: the token that represents a text, as in `Tower`.
    """

    image: Classifier
    text: Bert
    features: int | None
    pool: "AttentionPool | None" = None
    biased: bool = False
    token: int | str = "last"

    @nn.compact
    def __call__(
        self, images: jax.Array, tokens: jax.Array, at: Any = None
    ) -> tuple[jax.Array, ...]:
        """Compare images with texts.

        Args:
          images: [B, height, width, channels].
          tokens: int [C, T], the texts.
          at: int [C], the index of the token that represents each text (default: by `token`).

        Returns:
          Features of images [B, features] and of texts [C, features], of length 1; and the logits
          [B, C], their scaled dot products.
        """
        x = _pool_tokens(self.image(images), self.pool)
        y = _pool_tokens(self.text(tokens), at=_find(self.token, tokens, at))
        if self.features is None:
            y = Projection(y.shape[-1:], ("embed", None), name="text_projection")(y)
        else:
            x, y = (
                Projection((self.features,), ("embed", None), bias_init=None, name=name)(z)
                for name, z in (("image_projection", x), ("text_projection", y))
            )
        x, y = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
        logits = jnp.exp(self.param("logit_scale", nn.initializers.zeros, ())) * (x @ y.T)
        if self.biased:
            logits = logits + self.param("logit_bias", nn.initializers.zeros, ())
        return x, y, logits


class Tower(nn.Module):
    """One of the two encoders alone, with one feature vector for each input.

    Attributes:
      encoder: the encoder of images or of texts.
      pool: a layer that pools the tokens (default: take one of them).
      projected: True if a linear layer projects the pooled vector.
      norm: a norm of the pooled vector (CLIP's images), or None.
      token: the token that represents an input: "first", "last", the one with the "largest" id, or
        the first one with this id.
    """

    encoder: Classifier | Bert
    pool: "AttentionPool | None" = None
    projected: bool = False
    norm: nn.Module | None = None
    token: int | str = "first"

    @nn.compact
    def __call__(self, inputs: jax.Array, at: Any = None) -> tuple[jax.Array, jax.Array]:
        """Encode images or texts to features of tokens [*B, T, D] and of inputs [*B, D].

        Args:
          inputs: images [*B, height, width, channels], or tokens int [*B, T].
          at: int [*B], the index of the token that represents each input (default: by `token`).
        """
        x = self.encoder(inputs)
        y = _pool_tokens(x, self.pool, _find(self.token, inputs, at))
        y = y if self.norm is None else self.norm(y)
        if self.projected:
            y = Projection(y.shape[-1:], ("embed", None), name="projection")(y)
        return x, y


def _find(token: int | str, inputs: jax.Array, at: Any) -> Any:
    """Return `at`, or the indices [*B] of the tokens that represent the inputs."""
    if at is not None:
        return at
    if token in ("first", "last"):
        return 0 if token == "first" else -1
    return jnp.argmax(inputs if token == "largest" else inputs == token, -1)


def _pool_tokens(x: jax.Array, pool: Any = None, at: Any = 0) -> jax.Array:
    """Return one vector [*B, D] for tokens [*B, T, D]: the pool's output, or token `at`."""
    if pool is not None:
        return pool(x)
    if isinstance(at, int):
        return x[..., at, :]
    return jnp.take_along_axis(x, jnp.asarray(at)[..., None, None], -2)[..., 0, :]


class AttentionPool(nn.Module):
    """A pooling layer: a learned query attends to all tokens, then an MLP with a residual.

    Attributes:
      attention: the attention layer.
      mlp: the MLP.
      epsilon: the epsilon of the norm before the MLP.

    Source: Zhai et al., "Scaling Vision Transformers", 2022.
    """

    attention: MultiHeadAttention
    mlp: MLP
    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Pool [*B, T, D] to [*B, D]."""
        D = x.shape[-1]
        probe = self.param("probe", nn.initializers.lecun_normal(), (1, D))
        y = self.attention(numerics.spread(probe, (*x.shape[:-2], 1, D), probe.dtype), x)
        return (y + self.mlp(layer_norm(self.epsilon, name="norm")(y)))[..., 0, :]


_TEXT = (np.zeros((1, 1), np.int32), np.zeros(1, np.int32))


def towers(config: Config) -> table.Family:
    """Return the family of `CLIPModel` and `SiglipModel`."""
    traits = KINDS[config["model_type"]]
    vision, text = _part(config, "vision", traits.vision), _part(config, "text", traits.text)
    features = config.get("projection_dim", 512) if traits.is_clip else None
    module = Towers(
        _image(vision, traits), _text(text, traits), features, _pool(vision, traits),
        not traits.is_clip, _text_token(text, traits),
    )  # fmt: skip
    rows = _images(vision, traits, "image") + _texts(text, "text")
    if traits.is_clip:
        rows += [
            *table.linear("visual_projection", "image_projection", bias=False),
            *table.linear("text_projection", "text_projection", bias=False),
            table.TensorRule("logit_scale", "logit_scale"),
        ]
    else:
        rows += table.linear("text_model.head", "text_projection")
        rows += [table.TensorRule(x, x, table.wrapped(1)) for x in ("logit_scale", "logit_bias")]
    example = grid(vision).image(vision["num_channels"])
    return table.Family(module, (example, *_TEXT), rows, BUFFERS)


def images(config: Config) -> table.Family:
    """Return the family of `CLIPVisionModel` and `SiglipVisionModel`, without a projection.

    As in `transformers`, CLIP norms the image's vector alone, and SigLIP all tokens.
    """
    traits = KINDS[config["model_type"].removesuffix("_vision_model")]
    vision = filled(config, **traits.vision)
    module = Tower(_image(vision, traits), _pool(vision, traits))
    rows, heads = _images(vision, traits, "encoder"), ("visual_projection.*", "classifier.*")
    if traits.is_clip:
        stack = module.encoder.encoder.clone(final_norm=False)
        norm = layer_norm(vision["layer_norm_eps"])
        module = module.clone(encoder=module.encoder.clone(encoder=stack), norm=norm)
        name = "vision_model.post_layernorm"
        rows = [x for x in rows if not x.theirs.startswith(name)] + table.norm(name, "norm")
    example = (grid(vision).image(vision["num_channels"]),)
    return table.Family(module, example, rows, BUFFERS, heads, "vision_model.")


def texts(config: Config) -> table.Family:
    """Return the family of `CLIPTextModel` and `SiglipTextModel`, without a projection."""
    traits = KINDS[config["model_type"].removesuffix("_text_model")]
    text = filled(config, **traits.text)
    module = Tower(
        _text(text, traits), projected=not traits.is_clip, token=_text_token(text, traits)
    )
    rows = _texts(text, "encoder")
    rows += [] if traits.is_clip else table.linear("text_model.head", "projection")
    return table.Family(module, _TEXT, rows, BUFFERS, ("text_projection.*",), "text_model.")


def _part(config: Config, name: str, defaults: dict[str, Any]) -> FileSettings:
    """Return the settings of the encoder `name`, filled with defaults."""
    part: FileSettings = config[f"{name}_config"]
    # The first configs have a second copy of the settings, which must agree.
    other: Config = config.get(f"{name}_config_dict") or {}
    for setting in other:
        refuse(other, **{setting: part.get(setting, defaults.get(setting, other[setting]))})
    return filled(part, **defaults)


def _image(config: Config, traits: ClipTraits) -> Classifier:
    token = traits.is_clip
    return image(config, int(token), patch_bias=not token, input_norm=token)


def _text(config: Config, traits: ClipTraits) -> Bert:
    return Bert(
        TokenEmbedding(config["vocab_size"], config["hidden_size"]), None,
        PositionEmbedding(max_length=config["max_position_embeddings"]),
        Encoder(
            config["num_hidden_layers"],
            block(config, mask=masks.Causal() if traits.is_clip else None),
        ),
    )  # fmt: skip


def _text_token(config: Config, traits: ClipTraits) -> int | str:
    """Return the token that represents a text, as the field of `Tower`."""
    if not traits.is_clip:
        return "last"
    end = config["eos_token_id"]
    if not isinstance(end, int):
        raise ValueError(f"the config's eos_token_id must be one number, got {end}; {REMEDY}")
    # The first configs have 2 in place of the id of the end, which is the largest.
    return "largest" if end == 2 else end


def _pool(config: Config, traits: ClipTraits) -> AttentionPool | None:
    if traits.is_clip:
        return None
    refuse(config, vision_use_head=True)
    layer = MultiHeadAttention(config["num_attention_heads"])
    mlp = MLP(config["intermediate_size"], activation(config, "hidden_act"))
    return AttentionPool(layer, mlp, config["layer_norm_eps"])


def _images(config: Config, traits: ClipTraits, ours: str) -> list[table.TensorRule]:
    theirs, kernel = "vision_model.embeddings", table.patches(*grid(config).patch)
    token = traits.is_clip
    rows = [
        *table.linear(
            f"{theirs}.patch_embedding", f"{ours}/embedding/patches", not token, axes=kernel
        ),
        table.TensorRule(f"{theirs}.position_embedding.weight", f"{ours}/positions/embedding"),
        *_layers("vision_model", f"{ours}/encoder", config),
        *table.norm("vision_model.post_layernorm", f"{ours}/encoder/norm"),
    ]
    if token:
        name, axes = f"{theirs}.class_embedding", table.FLATTENED
        rows.append(table.TensorRule(name, f"{ours}/class_tokens", axes))
        return rows + table.norm("vision_model.pre_layrnorm", f"{ours}/encoder/input_norm")
    head, layer, leaves = "vision_model.head", "pool/attention", ("weight", "bias")
    return [
        *rows,
        table.TensorRule(f"{head}.probe", "pool/probe", table.wrapped(1)),
        *table.attention(f"{head}.attention", layer, table.TORCH_HEADS, leaves=leaves),
        *table.parts(
            head, "pool", {"layernorm": "norm", "mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down"}
        ),
    ]


def _texts(config: Config, ours: str) -> list[table.TensorRule]:
    theirs = "text_model.embeddings"
    return [
        table.TensorRule(f"{theirs}.token_embedding.weight", f"{ours}/embedding/table/embedding"),
        table.TensorRule(f"{theirs}.position_embedding.weight", f"{ours}/positions/embedding"),
        *_layers("text_model", f"{ours}/encoder", config),
        *table.norm("text_model.final_layer_norm", f"{ours}/encoder/norm"),
    ]


def _layers(theirs: str, ours: str, config: Config) -> list[table.TensorRule]:
    count, layer = config["num_hidden_layers"], f"{theirs}.encoder.layers.{{}}"
    return table.stack(count, layer, ours, {"self_attn": "attention"}, HEADS, {
        "layer_norm1": "attention_norm", "layer_norm2": "mlp_norm",
        "mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down",
    })  # fmt: skip
