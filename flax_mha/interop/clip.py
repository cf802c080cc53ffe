"""CLIP and SigLIP: an image encoder and a text encoder, together or separately."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import masks
from flax_mha.base import numerics
from flax_mha.interop import table
from flax_mha.interop.bert import BUFFERS, Bert
from flax_mha.interop.checked_config import REMEDY, Config, FileSettings, filled
from flax_mha.interop.shared_settings import activation, example_image, grid, refuse
from flax_mha.interop.vision import block, image
from flax_mha.layer.linear import Projection
from flax_mha.layer.qk_norm import layer_norm
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Classifier, Encoder, PositionEmbedding, TokenEmbedding
from flax_mha.models.feed_forward import MLP

HEADS = ("q_proj", "k_proj", "v_proj", "out_proj")


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
    """An image encoder and a text encoder with a common feature space: CLIP, SigLIP.

    Attributes:
      image: the image encoder.
      text: the text encoder.
      features: the size of the common space, or None if the encoders share one.
      pool: the layer that pools an image's tokens (default: take the first one).
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
          at: int [C], the index of the token that represents each text (default: by `token`).

        Returns:
          Unit features of images [B, features] and of texts [C, features], and the logits [B, C],
          which are their scaled dot products.
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
    """One of the two encoders, with one feature vector for each input.

    Attributes:
      encoder: the encoder of images or texts.
      pool: a layer that pools the tokens (default: take one of them).
      projected: True if a linear layer follows.
      norm: the norm of the pooled vector, or None.
      token: the token that represents an input: "first", "last", the "largest" id, or the first one
        with this id.
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
    """Return the pool's output [*B, D] for tokens [*B, T, D], or token `at`."""
    if pool is not None:
        return pool(x)
    if isinstance(at, int):
        return x[..., at, :]
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


def towers(config: Config) -> table.Family:
    """Return the family of `CLIPModel` and `SiglipModel`."""
    kind = config["model_type"]
    defaults, is_clip = _DEFAULTS[kind], kind == "clip"
    text, token, text_rows = _texts(_part(config, "text", defaults[0]), is_clip, "text")
    vision = _part(config, "vision", defaults[1])
    image, pool, rows, example = _images(vision, is_clip, "image")
    features = config.get("projection_dim", 512) if is_clip else None
    module = Towers(image, text, features, pool, not is_clip, token)
    if is_clip:
        rows += [
            *table.linear("visual_projection", "image_projection", bias=False),
            *table.linear("text_projection", "text_projection", bias=False),
            table.TensorRule("logit_scale", "logit_scale"),
        ]
    else:
        rows += table.linear("text_model.head", "text_projection")
        rows += [table.TensorRule(x, x, table.wrapped(1)) for x in ("logit_scale", "logit_bias")]
    return table.Family(module, (example, *_TEXT), rows + text_rows, BUFFERS)


def images(config: Config) -> table.Family:
    """Return the family of `CLIPVisionModel` and `SiglipVisionModel`, without a projection.

    As in `transformers`, CLIP norms only the image's vector, and SigLIP norms all tokens.
    """
    kind = config["model_type"].removesuffix("_vision_model")
    config = filled(config, **_DEFAULTS[kind][1])
    encoder, pool, rows, example = _images(config, kind == "clip", "encoder")
    norm = None
    if kind == "clip":
        encoder = encoder.clone(encoder=encoder.encoder.clone(final_norm=False))
        norm, name = layer_norm(config["layer_norm_eps"]), "vision_model.post_layernorm"
        rows = [x for x in rows if not x.theirs.startswith(name)] + table.norm(name, "norm")
    heads = ("visual_projection.*", "classifier.*")
    module = Tower(encoder, pool, norm=norm)
    return table.Family(module, (example,), rows, BUFFERS, heads, "vision_model.")


def texts(config: Config) -> table.Family:
    """Return the family of `CLIPTextModel` and `SiglipTextModel`, without a projection."""
    kind = config["model_type"].removesuffix("_text_model")
    is_clip = kind == "clip"
    encoder, token, rows = _texts(filled(config, **_DEFAULTS[kind][0]), is_clip, "encoder")
    rows += [] if is_clip else table.linear("text_model.head", "projection")
    module = Tower(encoder, projected=not is_clip, token=token)
    return table.Family(module, _TEXT, rows, BUFFERS, ("text_projection.*",), "text_model.")


def _part(config: Config, name: str, defaults: dict[str, Any]) -> FileSettings:
    """Return the settings of the encoder `name`, filled with defaults."""
    part: FileSettings = config[f"{name}_config"]
    # The first configs have a second copy of the settings, which must agree.
    other: Config = config.get(f"{name}_config_dict") or {}
    for setting in other:
        refuse(other, **{setting: part.get(setting, defaults.get(setting, other[setting]))})
    return filled(part, **defaults)


def _images(
    config: Config, is_clip: bool, ours: str
) -> tuple[Classifier, AttentionPool | None, list[table.TensorRule], np.ndarray]:
    """Return the image encoder, SigLIP's pool, their rules, and an example image.

    In CLIP a learned token represents the image.
    """
    encoder = image(config, int(is_clip), patch_bias=not is_clip, input_norm=is_clip)
    theirs = "vision_model.embeddings"
    rows = [
        *table.linear(
            f"{theirs}.patch_embedding", f"{ours}/embedding/patches", not is_clip,
            axes=table.patches(*grid(config)[1]),
        ),
        table.TensorRule(f"{theirs}.position_embedding.weight", f"{ours}/positions/embedding"),
        *_layers("vision_model", f"{ours}/encoder", config),
        *table.norm("vision_model.post_layernorm", f"{ours}/encoder/norm"),
    ]  # fmt: skip
    example = example_image(config, config["num_channels"])
    if is_clip:
        name, axes = f"{theirs}.class_embedding", table.FLATTENED
        rows.append(table.TensorRule(name, f"{ours}/class_tokens", axes))
        rows += table.norm("vision_model.pre_layrnorm", f"{ours}/encoder/input_norm")
        return encoder, None, rows, example
    refuse(config, vision_use_head=True)
    mlp = MLP(config["intermediate_size"], activation(config, "hidden_act"))
    layer = MultiHeadAttention(config["num_attention_heads"])
    head, leaves = "vision_model.head", ("weight", "bias")
    rows += [
        table.TensorRule(f"{head}.probe", "pool/probe", table.wrapped(1)),
        *table.attention(f"{head}.attention", "pool/attention", table.TORCH_HEADS, leaves=leaves),
        *table.parts(
            head, "pool", {"layernorm": "norm", "mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down"}
        ),
    ]
    return encoder, AttentionPool(layer, mlp, config["layer_norm_eps"]), rows, example


def _texts(
    config: Config, is_clip: bool, ours: str
) -> tuple[Bert, int | str, list[table.TensorRule]]:
    """Return the text encoder, the token that represents a text (see `Tower`), and the rules."""
    theirs, D, mask = "text_model.embeddings", config["hidden_size"], None
    token: int | str = "last"
    if is_clip:
        mask, token = masks.Causal(), config["eos_token_id"]
        if not isinstance(token, int):
            raise ValueError(f"the config's eos_token_id must be one number, got {token}; {REMEDY}")
        # The first configs have 2 in place of the largest id.
        token = "largest" if token == 2 else token
    encoder = Bert(
        TokenEmbedding(config["vocab_size"], D), None,
        PositionEmbedding(max_length=config["max_position_embeddings"]),
        Encoder(config["num_hidden_layers"], block(config, mask=mask)),
    )  # fmt: skip
    return encoder, token, [
        table.TensorRule(f"{theirs}.token_embedding.weight", f"{ours}/embedding/table/embedding"),
        table.TensorRule(f"{theirs}.position_embedding.weight", f"{ours}/positions/embedding"),
        *_layers("text_model", f"{ours}/encoder", config),
        *table.norm("text_model.final_layer_norm", f"{ours}/encoder/norm"),
    ]  # fmt: skip


def _layers(theirs: str, ours: str, config: Config) -> list[table.TensorRule]:
    count, layer = config["num_hidden_layers"], f"{theirs}.encoder.layers.{{}}"
    return table.stack(count, layer, ours, {"self_attn": "attention"}, HEADS, {
        "layer_norm1": "attention_norm", "layer_norm2": "mlp_norm",
        "mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down",
    })  # fmt: skip
