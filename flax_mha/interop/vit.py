"""ViT, DeiT, CLIP and SigLIP: encoders of images, alone or beside one of text."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import masks
from flax_mha.attention import MultiHeadAttention
from flax_mha.blocks import EncoderBlock
from flax_mha.embeddings import PatchEmbedding, TokenEmbedding
from flax_mha.interop.bert import POOLER, Bert
from flax_mha.interop.classes import classified
from flax_mha.interop.config import activation, blank, grid
from flax_mha.interop.settings import Config
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
from flax_mha.linear import Projection
from flax_mha.mlp import MLP
from flax_mha.models import Classifier
from flax_mha.positions import PositionEmbedding
from flax_mha.stacks import Encoder

HEADS = ("q_proj", "k_proj", "v_proj", "out_proj")


class Towers(nn.Module):
    """Features of images and of texts in one space: CLIP, SigLIP.

    Attributes:
      image: to features of tokens, of which the first stands for all, or what `pool` makes of them.
      text: likewise; which of its tokens stands for all says the call.
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
        x, y = self.image(images), self.text(tokens)
        x = x[..., 0, :] if self.pool is None else self.pool(x)
        y = jnp.take_along_axis(y, jnp.asarray(at)[..., None, None], -2)[..., 0, :]
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


def vit(config: Config) -> Family:
    """Of `ViTModel`, and of `DeiTModel`, which has one more token, of distillation.

    Both `…ForImageClassification` too.
    """
    kind = config["model_type"]
    biased = config.get("qkv_bias", True)
    theirs, ours = "encoder.layer.{}", "encoder/layers_{}"
    own = ("attention.query", "attention.key", "attention.value", "output.dense")
    biases = (biased, biased, biased, True)
    kernel = patches(*grid(config)[2:])
    rows = [
        Row("embeddings.cls_token", "class_tokens", wrapped(1), part=(0, 1)),
        *[Row("embeddings.distillation_token", "class_tokens", wrapped(1), part=(1, 2))]
        * (kind == "deit"),
        Row("embeddings.position_embeddings", "positions/embedding", wrapped(1)),
        *linear("embeddings.patch_embeddings.projection", "embedding/patches", axes=kernel),
        *each(config["num_hidden_layers"], [
            *attention(f"{theirs}.attention", f"{ours}/attention", own, biases),
            *norm(f"{theirs}.layernorm_before", f"{ours}/attention_norm"),
            *norm(f"{theirs}.layernorm_after", f"{ours}/mlp_norm"),
            *linear(f"{theirs}.intermediate.dense", f"{ours}/mlp/up"),
            *linear(f"{theirs}.output.dense", f"{ours}/mlp/down"),
        ]),
        *norm("layernorm", "encoder/norm"),
    ]  # fmt: skip
    module = _image(config, class_tokens=1 + (kind == "deit"), biased=biased)
    ignored = (*POOLER, "embeddings.mask_token")
    heads = ("*classifier.*",)
    family = Family(module, (_example(config),), rows, ignored, heads, f"{kind}.")
    return classified(config, family)


def clip(config: Config) -> Family:
    """Of `CLIPModel`."""
    image, text = config["vision_config"], config["text_config"]
    module = Towers(
        _image(image, class_tokens=1, input_norm=True, patch_bias=False), _text(text, causal=True),
        config["projection_dim"],
    )  # fmt: skip
    rows = [
        *_images(image, patch_bias=False),
        Row("vision_model.embeddings.class_embedding", "image/class_tokens", FLAT),
        *norm("vision_model.pre_layrnorm", "image/encoder/input_norm"),
        *_texts(text),
        *linear("visual_projection", "image_projection", bias=False),
        *linear("text_projection", "text_projection", bias=False),
        Row("logit_scale", "logit_scale"),
    ]
    return Family(module, (_example(image), *_TEXT), rows, POOLER)


def siglip(config: Config) -> Family:
    """Of `SiglipModel`."""
    image, text = config["vision_config"], config["text_config"]
    layer = MultiHeadAttention(image["num_attention_heads"])
    mlp = MLP(image["intermediate_size"], activation(image, "hidden_act"))
    pool = AttentionPool(layer, mlp, image["layer_norm_eps"])
    module = Towers(_image(image), _text(text, causal=False), None, pool, biased=True)
    head, own = "vision_model.head", "pool"
    fused = tuple(f"{own}/attention/{name}" for name in PROJECTIONS[:3])
    rows = [
        *_images(image),
        *_texts(text),
        *linear("text_model.head", "text_projection"),
        Row(f"{head}.probe", f"{own}/probe", wrapped(1)),
        *linear(f"{head}.attention.in_proj", fused, leaves=("_weight", "_bias")),
        *linear(f"{head}.attention.out_proj", f"{own}/attention/out", inputs=2),
        *norm(f"{head}.layernorm", f"{own}/norm"),
        *linear(f"{head}.mlp.fc1", f"{own}/mlp/up"),
        *linear(f"{head}.mlp.fc2", f"{own}/mlp/down"),
        Row("logit_scale", "logit_scale", wrapped(1)),
        Row("logit_bias", "logit_bias", wrapped(1)),
    ]
    return Family(module, (_example(image), *_TEXT), rows, POOLER)


# One text of one token.
_TEXT = (np.zeros((1, 1), np.int32), np.zeros(1, np.int32))


def _block(config: Config, biased: bool = True, **fields: Any) -> EncoderBlock:
    biases = True if biased else ("out",)
    return EncoderBlock(
        MultiHeadAttention(config["num_attention_heads"], use_bias=biases, **fields),
        config["intermediate_size"], activation=activation(config, "hidden_act"),
        norm_epsilon=config["layer_norm_eps"],
    )  # fmt: skip


def _image(
    config: Config, class_tokens: int = 0, biased: bool = True, patch_bias: bool = True,
    input_norm: bool = False,
) -> Classifier:  # fmt: skip
    stack = Encoder(config["num_hidden_layers"], _block(config, biased), input_norm=input_norm)
    embedding = PatchEmbedding(grid(config)[2:], config["hidden_size"], use_bias=patch_bias)
    return Classifier(embedding, stack, None, class_tokens=class_tokens)


def _text(config: Config, causal: bool) -> Bert:
    block = _block(config, mask=masks.Causal() if causal else None)
    return Bert(
        TokenEmbedding(config["vocab_size"], config["hidden_size"]), None,
        PositionEmbedding(max_length=config["max_position_embeddings"]),
        Encoder(config["num_hidden_layers"], block),
    )  # fmt: skip


def _example(config: Config) -> np.ndarray:
    down, across, h, w = grid(config)
    return blank(1, down * h, across * w, config["num_channels"])


def _images(config: Config, patch_bias: bool = True) -> list[Row]:
    at, kernel = "vision_model.embeddings", patches(*grid(config)[2:])
    return [
        *linear(f"{at}.patch_embedding", "image/embedding/patches", patch_bias, axes=kernel),
        Row(f"{at}.position_embedding.weight", "image/positions/embedding"),
        *_layers("vision_model.encoder.layers", "image/encoder", config),
        *norm("vision_model.post_layernorm", "image/encoder/norm"),
    ]


def _texts(config: Config) -> list[Row]:
    return [
        Row("text_model.embeddings.token_embedding.weight", "text/embedding/table/embedding"),
        Row("text_model.embeddings.position_embedding.weight", "text/positions/embedding"),
        *_layers("text_model.encoder.layers", "text/encoder", config),
        *norm("text_model.final_layer_norm", "text/encoder/norm"),
    ]


def _layers(theirs: str, ours: str, config: Config) -> list[Row]:
    at, own = f"{theirs}.{{}}", f"{ours}/layers_{{}}"
    return each(config["num_hidden_layers"], [
        *attention(f"{at}.self_attn", f"{own}/attention", HEADS),
        *norm(f"{at}.layer_norm1", f"{own}/attention_norm"),
        *norm(f"{at}.layer_norm2", f"{own}/mlp_norm"),
        *linear(f"{at}.mlp.fc1", f"{own}/mlp/up"),
        *linear(f"{at}.mlp.fc2", f"{own}/mlp/down"),
    ])  # fmt: skip
