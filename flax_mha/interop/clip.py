"""CLIP and SigLIP: an encoder of images beside one of text, and each of the two alone."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import masks
from flax_mha.interop.bert import BUFFERS, Bert
from flax_mha.interop.config import activation, grid, refuse
from flax_mha.interop.settings import Config, FileSettings, filled
from flax_mha.interop.table import (
    FLAT,
    PROJECTIONS,
    Family,
    Row,
    attention,
    each,
    linear,
    norm,
    patches,
    wrapped,
)  # fmt: skip
from flax_mha.interop.vision import block, example, image
from flax_mha.layer.linear import Projection
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Classifier
from flax_mha.models.embeddings import TokenEmbedding
from flax_mha.models.feed_forward import MLP
from flax_mha.models.stacks import Encoder
from flax_mha.positions import PositionEmbedding

HEADS = ("q_proj", "k_proj", "v_proj", "out_proj")


class Kind(NamedTuple):
    """The record of a model type.

    Attributes:
      text: defaults of its `text_config`, of which files leave out what is as it is there.
      vision: and of its `vision_config`.
      class_token: whether images have a learned token, which stands for all; else a layer pools.
      causal: whether texts are read causally.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    class_token: bool
    causal: bool


_SIZES = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768,
          "intermediate_size": 3072}  # fmt: skip
_IMAGES = _SIZES | {"image_size": 224, "num_channels": 3}
_CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
KINDS = {
    "clip": Kind(
        _CLIP | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
                 "num_attention_heads": 8, "vocab_size": 49408, "max_position_embeddings": 77},
        _IMAGES | _CLIP | {"patch_size": 32}, class_token=True, causal=True,
    ),
    "siglip": Kind(
        _SIZES | _SIGLIP | {"vocab_size": 32000, "max_position_embeddings": 64},
        _IMAGES | _SIGLIP | {"patch_size": 16}, class_token=False, causal=False,
    ),
}  # fmt: skip


class Towers(nn.Module):
    """Features of images and of texts in one space: CLIP, SigLIP.

    Attributes:
      image: to features of tokens, of which the first stands for all, or what `pool` makes of them.
      text: to features of tokens; which of them stands for all says the call.
      features: of the common space; None where the towers are in it already.
      pool: attends from one learned query to all tokens of an image (SigLIP).
      biased: whether the logits have a learned bias.
    """

    image: Classifier
    text: Bert
    features: int | None
    pool: "AttentionPool | None" = None
    biased: bool = False

    @nn.compact
    def __call__(self, images: jax.Array, tokens: jax.Array, at: Any) -> tuple[jax.Array, ...]:
        """Compares images with texts.

        Args:
          images: [B, height, width, channels].
          tokens: int [C, T].
          at: int [C], the token of each text that stands for all.

        Returns:
          Features of images [B, features] and of texts [C, features], of length 1; and logits
          [B, C] of their products.
        """
        x = _pool_tokens(self.image(images), self.pool, None)
        y = _pool_tokens(self.text(tokens), None, at)
        if self.features is None:
            y = Projection(y.shape[-1:], ("embed", None), name="text_projection")(y)
        else:
            x, y = (
                Projection((self.features,), ("embed", None), bias_init=None, name=name)(each)
                for name, each in (("image_projection", x), ("text_projection", y))
            )
        x, y = (each / jnp.linalg.norm(each, axis=-1, keepdims=True) for each in (x, y))
        logits = jnp.exp(self.param("logit_scale", nn.initializers.zeros, ())) * (x @ y.T)
        if self.biased:
            logits = logits + self.param("logit_bias", nn.initializers.zeros, ())
        return x, y, logits


class Tower(nn.Module):
    """One of the two encoders alone, to features of tokens and to one vector.

    Attributes:
      encoder: of images or of texts.
      pool: makes one vector of the tokens (default: one of them).
      projected: whether a linear layer follows for the one vector.
    """

    encoder: Classifier | Bert
    pool: "AttentionPool | None" = None
    projected: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array, at: Any = None) -> tuple[jax.Array, jax.Array]:
        """Map images or texts to features of tokens [*B, T, D], normed, and to [*B, D].

        Args:
          inputs: images [*B, height, width, channels], or tokens int [*B, T].
          at: int [*B], the token that stands for all; None for the first.
        """
        x = self.encoder(inputs)
        y = _pool_tokens(x, self.pool, at)
        if self.projected:
            y = Projection(y.shape[-1:], ("embed", None), name="projection")(y)
        return x, y


def _pool_tokens(x: jax.Array, pool: Any, at: Any) -> jax.Array:
    """Return one vector [*B, D] for tokens [*B, T, D]: that of the pool, or of a token."""
    if pool is not None or at is None:
        return x[..., 0, :] if pool is None else pool(x)
    return jnp.take_along_axis(x, jnp.asarray(at)[..., None, None], -2)[..., 0, :]


class AttentionPool(nn.Module):
    """One learned query attends to all tokens; then an MLP, with a residual.

    Source: Zhai et al., "Scaling Vision Transformers", 2022.
    """

    attention: MultiHeadAttention
    mlp: MLP
    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [*B, T, D] to [*B, D]."""
        D = x.shape[-1]
        probe = self.param("probe", nn.initializers.lecun_normal(), (1, D))
        y = self.attention(jnp.broadcast_to(probe, (*x.shape[:-2], 1, D)), x)
        return (y + self.mlp(nn.LayerNorm(self.epsilon, name="norm")(y)))[..., 0, :]


_TEXT = (np.zeros((1, 1), np.int32), np.zeros(1, np.int32))


def towers(config: Config) -> Family:
    """Return the family of `CLIPModel` and `SiglipModel`."""
    kind = KINDS[config["model_type"]]
    vision, text = _part(config, "vision", kind.vision), _part(config, "text", kind.text)
    features = config.get("projection_dim", 512) if kind.class_token else None
    module = Towers(
        _image(vision, kind), _text(text, kind), features, _pool(vision, kind),
        biased=not kind.class_token,
    )  # fmt: skip
    rows = [*_images(vision, kind, "image"), *_texts(text, "text")]
    if kind.class_token:
        rows += [
            *linear("visual_projection", "image_projection", bias=False),
            *linear("text_projection", "text_projection", bias=False),
            Row("logit_scale", "logit_scale"),
        ]
    else:
        rows += linear("text_model.head", "text_projection")
        rows += [Row(x, x, wrapped(1)) for x in ("logit_scale", "logit_bias")]
    return Family(module, (example(vision), *_TEXT), rows, BUFFERS)


def images(config: Config) -> Family:
    """Return the family of `CLIPVisionModel` and `SiglipVisionModel`; a projection is left out."""
    kind = KINDS[config["model_type"].removesuffix("_vision_model")]
    vision = filled(config, **kind.vision)
    module = Tower(_image(vision, kind), _pool(vision, kind))
    rows, heads = _images(vision, kind, "encoder"), ("visual_projection.*", "classifier.*")
    return Family(module, (example(vision),), rows, BUFFERS, heads, "vision_model.")


def texts(config: Config) -> Family:
    """Return the family of `CLIPTextModel` and `SiglipTextModel`; a projection is left out."""
    kind = KINDS[config["model_type"].removesuffix("_text_model")]
    text = filled(config, **kind.text)
    module = Tower(_text(text, kind), projected=not kind.class_token)
    rows = _texts(text, "encoder")
    rows += [] if kind.class_token else linear("text_model.head", "projection")
    return Family(module, _TEXT, rows, BUFFERS, ("text_projection.*",), "text_model.")


def _part(config: Config, name: str, defaults: dict[str, Any]) -> FileSettings:
    """Return the settings of a tower."""
    part: FileSettings = config[f"{name}_config"]
    # The first configs had a second part, which counts.
    other: Config = config.get(f"{name}_config_dict") or {}
    for setting in other:
        refuse(other, **{setting: part.get(setting, defaults.get(setting, other[setting]))})
    return filled(part, **defaults)


def _image(config: Config, kind: Kind) -> Classifier:
    token = kind.class_token
    return image(config, int(token), patch_bias=not token, input_norm=token)


def _text(config: Config, kind: Kind) -> Bert:
    own = block(config, mask=masks.Causal() if kind.causal else None)
    return Bert(
        TokenEmbedding(config["vocab_size"], config["hidden_size"]), None,
        PositionEmbedding(max_length=config["max_position_embeddings"]),
        Encoder(config["num_hidden_layers"], own),
    )  # fmt: skip


def _pool(config: Config, kind: Kind) -> AttentionPool | None:
    if kind.class_token:
        return None
    refuse(config, vision_use_head=True)
    layer = MultiHeadAttention(config["num_attention_heads"])
    mlp = MLP(config["intermediate_size"], activation(config, "hidden_act"))
    return AttentionPool(layer, mlp, config["layer_norm_eps"])


def _images(config: Config, kind: Kind, ours: str) -> list[Row]:
    at, kernel = "vision_model.embeddings", patches(*grid(config)[2:])
    token = kind.class_token
    rows = [
        *linear(f"{at}.patch_embedding", f"{ours}/embedding/patches", not token, axes=kernel),
        Row(f"{at}.position_embedding.weight", f"{ours}/positions/embedding"),
        *_layers("vision_model", f"{ours}/encoder", config),
        *norm("vision_model.post_layernorm", f"{ours}/encoder/norm"),
    ]
    if token:
        rows.append(Row(f"{at}.class_embedding", f"{ours}/class_tokens", FLAT))
        return rows + norm("vision_model.pre_layrnorm", f"{ours}/encoder/input_norm")
    head, own = "vision_model.head", "pool"
    fused = tuple(f"{own}/attention/{name}" for name in PROJECTIONS[:3])
    return [
        *rows,
        Row(f"{head}.probe", f"{own}/probe", wrapped(1)),
        *linear(f"{head}.attention.in_proj", fused, leaves=("_weight", "_bias")),
        *linear(f"{head}.attention.out_proj", f"{own}/attention/out", inputs=2),
        *norm(f"{head}.layernorm", f"{own}/norm"),
        *linear(f"{head}.mlp.fc1", f"{own}/mlp/up"),
        *linear(f"{head}.mlp.fc2", f"{own}/mlp/down"),
    ]


def _texts(config: Config, ours: str) -> list[Row]:
    return [
        Row("text_model.embeddings.token_embedding.weight", f"{ours}/embedding/table/embedding"),
        Row("text_model.embeddings.position_embedding.weight", f"{ours}/positions/embedding"),
        *_layers("text_model", f"{ours}/encoder", config),
        *norm("text_model.final_layer_norm", f"{ours}/encoder/norm"),
    ]


def _layers(theirs: str, ours: str, config: Config) -> list[Row]:
    at, own = f"{theirs}.encoder.layers.{{}}", f"{ours}/layers_{{}}"
    return each(config["num_hidden_layers"], [
        *attention(f"{at}.self_attn", f"{own}/attention", HEADS),
        *norm(f"{at}.layer_norm1", f"{own}/attention_norm"),
        *norm(f"{at}.layer_norm2", f"{own}/mlp_norm"),
        *linear(f"{at}.mlp.fc1", f"{own}/mlp/up"),
        *linear(f"{at}.mlp.fc2", f"{own}/mlp/down"),
    ])  # fmt: skip
