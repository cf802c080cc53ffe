"""CLIP and SigLIP: an image encoder and a text encoder, together or separately."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import masks
from flax_mha.base import numerics
from flax_mha.interop.bert import BUFFERS, Bert
from flax_mha.interop.checked_config import Config, filled
from flax_mha.interop.shared_settings import activation, block, example_image, grid, refuse
from flax_mha.interop.table import (
    FLATTENED,
    SAME,
    TORCH_HEADS,
    WRAPPED,
    Family,
    TensorRule,
    attention,
    linear,
    norm,
    parts,
    patches,
    per_layer,
)  # fmt: skip
from flax_mha.interop.vision import image
from flax_mha.layer.linear import Projection
from flax_mha.layer.qk_norm import layer_norm
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Classifier, Encoder, PositionEmbedding, TokenEmbedding
from flax_mha.models.feed_forward import MLP

_SIZES = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768,
          "intermediate_size": 3072}  # fmt: skip
_IMAGES = _SIZES | {"image_size": 224, "num_channels": 3}
_CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
# The defaults of `text_config` and `vision_config`, which files leave out.
_DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clip": (
        _CLIP | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
                 "num_attention_heads": 8, "vocab_size": 49408, "max_position_embeddings": 77,
                 "eos_token_id": 49407},
        _IMAGES | _CLIP | {"patch_size": 32},
    ),
    "siglip": (
        _SIZES | _SIGLIP | {"vocab_size": 32000, "max_position_embeddings": 64},
        _IMAGES | _SIGLIP | {"patch_size": 16},
    ),
}  # fmt: skip


class Towers(nn.Module):
    """An image encoder and a text encoder with common features: CLIP, SigLIP.

    Attributes:
      image: the image encoder.
      text: the text encoder.
      features: the size of the common space, or None if the encoders share one.
      pool: the pool of an image's tokens (default: the first one).
      biased: True if the logits have a learned bias.
      token: the token that represents a text (see `Tower`).
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
          at: int [C], the indices of the tokens that represent texts (default: by `token`).

        Returns:
          Unit features [B, features] and [C, features], and their scaled dot products [B, C].
        """
        x = _pool_tokens(self.image(images), self.pool, "first", images, None)
        y = _pool_tokens(self.text(tokens), None, self.token, tokens, at)
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
    """One of the two encoders, with one feature vector for each input.

    Attributes:
      encoder: the encoder of images or texts.
      pool: the pool of the tokens (default: one of them).
      projected: True if a linear layer follows.
      norm: the norm of the pooled vector, or None.
      token: the token that represents an input: "first", "last", "largest" (its id), or an id.
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
          at: int [*B], the indices of the tokens that represent inputs (default: by `token`).
        """
        x = self.encoder(inputs)
        y = _pool_tokens(x, self.pool, self.token, inputs, at)
        y = y if self.norm is None else self.norm(y)
        if self.projected:
            y = Projection(y.shape[-1:], ("embed", None), name="projection")(y)
        return x, y


def _pool_tokens(x: jax.Array, pool: Any, token: int | str, inputs: jax.Array, at: Any) -> Any:
    """Return a vector [*B, D] for tokens [*B, T, D] of inputs (see `Tower`)."""
    if pool is not None:
        return pool(x)
    if at is None and token in ("first", "last"):
        return x[..., 0 if token == "first" else -1, :]
    if at is None:
        at = jnp.argmax(inputs if token == "largest" else inputs == token, -1)
    return jnp.take_along_axis(x, jnp.asarray(at)[..., None, None], -2)[..., 0, :]


class AttentionPool(nn.Module):
    """A learned query that attends to all tokens, then an MLP with a norm and a residual.

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
_PARTS = {
    "self_attn.q_proj": "attention/query", "self_attn.k_proj": "attention/key",
    "self_attn.v_proj": "attention/value", "self_attn.out_proj": "attention/out",
    "layer_norm1": "attention_norm", "layer_norm2": "mlp_norm",
    "mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down",
}  # fmt: skip
# SigLIP's pool.
_POOL = {"layernorm": "norm", "mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down"}


def towers(config: Config) -> Family:
    """Return the family of `CLIPModel` and `SiglipModel`."""
    kind = config["model_type"]
    defaults, is_clip = _DEFAULTS[kind], kind == "clip"
    text, token, text_rows = _texts(_part(config, "text", defaults[0]), is_clip, "text")
    vision = _part(config, "vision", defaults[1])
    image, pool, rows = _images(vision, is_clip, "image")
    features = config.get("projection_dim", 512) if is_clip else None
    module = Towers(image, text, features, pool, not is_clip, token)
    head = "text_projection" if is_clip else "text_model.head"
    rows += parts("", "", {"visual_projection": "image_projection", head: "text_projection"})
    scalar = SAME if is_clip else WRAPPED
    rows += [TensorRule(x, x, scalar) for x in ("logit_scale", "logit_bias")]
    return Family(module, (*example_image(vision), *_TEXT), rows + text_rows, BUFFERS)


def images(config: Config) -> Family:
    """Return the family of `CLIPVisionModel` and `SiglipVisionModel`, without a projection.

    As in `transformers`, CLIP norms only the image's vector, and SigLIP norms all tokens.
    """
    kind, last = config["model_type"].removesuffix("_vision_model"), None
    config = filled(config, **_DEFAULTS[kind][1])
    encoder, pool, rows = _images(config, kind == "clip", "encoder")
    if kind == "clip":
        encoder = encoder.clone(encoder=encoder.encoder.clone(final_norm=False))
        last = layer_norm(config["layer_norm_eps"])
    rows += norm("vision_model.post_layernorm", "norm")
    heads = ("visual_projection.*", "classifier.*")
    module = Tower(encoder, pool, norm=last)
    return Family(module, example_image(config), rows, BUFFERS, heads, "vision_model.")


def texts(config: Config) -> Family:
    """Return the family of `CLIPTextModel` and `SiglipTextModel`, without a projection."""
    kind = config["model_type"].removesuffix("_text_model")
    is_clip = kind == "clip"
    encoder, token, rows = _texts(filled(config, **_DEFAULTS[kind][0]), is_clip, "encoder")
    rows += linear("text_model.head", "projection")
    module = Tower(encoder, projected=not is_clip, token=token)
    return Family(module, _TEXT, rows, BUFFERS, ("text_projection.*",), "text_model.")


def _part(config: Config, name: str, defaults: dict[str, Any]) -> Config:
    """Return the settings of the encoder `name`, filled with defaults."""
    part: Config = filled(config[f"{name}_config"], **defaults)
    # The first configs have a second copy of the settings, which must agree.
    other: Config = config.get(f"{name}_config_dict", {})
    refuse(other, **{setting: part.get(setting, other[setting]) for setting in other})
    return part


def _images(
    config: Config, is_clip: bool, ours: str
) -> tuple[Classifier, AttentionPool | None, list[TensorRule]]:
    """Return the image encoder, SigLIP's pool (CLIP has a learned token), and their rules."""
    encoder = image(config, block(config), is_clip, class_tokens=int(is_clip))
    theirs, layout = "vision_model.embeddings", patches(*grid(config)[1])
    head, leaves = "vision_model.head", ("weight", "bias")
    rows = [
        *linear(f"{theirs}.patch_embedding", f"{ours}/embedding/patches", lambda _: layout),
        TensorRule(f"{theirs}.class_embedding", f"{ours}/class_tokens", FLATTENED),
        *_rows("vision_model", ours, config, {
            "embeddings.position_embedding": "positions", "pre_layrnorm": "encoder/input_norm",
            "post_layernorm": "encoder/norm",
        }),
        TensorRule(f"{head}.probe", "pool/probe", WRAPPED),
        *attention(f"{head}.attention", "pool/attention", TORCH_HEADS, leaves=leaves),
        *parts(head, "pool", _POOL),
    ]  # fmt: skip
    if is_clip:
        return encoder, None, rows
    refuse(config, vision_use_head=True)
    mlp = MLP(config["intermediate_size"], activation(config, "hidden_act"))
    layer = MultiHeadAttention(config["num_attention_heads"])
    return encoder, AttentionPool(layer, mlp, config["layer_norm_eps"]), rows


def _texts(config: Config, is_clip: bool, ours: str) -> tuple[Bert, int | str, list[TensorRule]]:
    """Return the text encoder, the token that represents a text, and the rules."""
    mask, token = None, "last"
    if is_clip:
        # The first configs have 2 in place of the largest id.
        mask, token = masks.Causal(), config["eos_token_id"]
        token = "largest" if token == 2 else token
    encoder = Bert(
        TokenEmbedding(config["vocab_size"], config["hidden_size"]), None,
        PositionEmbedding(max_length=config["max_position_embeddings"]),
        Encoder(config["num_hidden_layers"], block(config, mask=mask)),
    )  # fmt: skip
    return encoder, token, _rows("text_model", ours, config, {
        "embeddings.token_embedding": "embedding/table",
        "embeddings.position_embedding": "positions", "final_layer_norm": "encoder/norm",
    })  # fmt: skip


def _rows(theirs: str, ours: str, config: Config, names: dict[str, str]) -> list[TensorRule]:
    layer = parts(f"{theirs}.encoder.layers.{{}}", f"{ours}/encoder/layers_{{}}", _PARTS)
    return parts(theirs, ours, names) + per_layer(config["num_hidden_layers"], layer)
