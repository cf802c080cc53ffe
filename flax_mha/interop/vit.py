"""ViT, DeiT and ViT-MSN: encoders of images."""

from typing import Any

import numpy as np

from flax_mha.interop.config import activation, blank, grid
from flax_mha.interop.modules import classified
from flax_mha.interop.settings import Config
from flax_mha.interop.table import Family, Row, attention, each, linear, norm, patches, wrapped
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Classifier
from flax_mha.models.blocks import EncoderBlock
from flax_mha.models.embeddings import PatchEmbedding
from flax_mha.models.stacks import Encoder

# What models that wrap it put before all names.
PREFIXES = {"vit": "vit.", "deit": "deit.", "vit_msn": "vit."}


def vit(config: Config) -> Family:
    """Return the family of `ViTModel`, `ViTMSNModel` or `DeiTModel`, or of a classifier of these.

    DeiT has one more token, of distillation.
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
    module = image(config, class_tokens=1 + (kind == "deit"), biased=biased)
    heads = ("*classifier.*", "pooler.*", "embeddings.mask_token")
    family = Family(module, (example(config),), rows, heads=heads, prefix=PREFIXES[kind])
    return classified(config, family)


def block(config: Config, biased: bool = True, **fields: Any) -> EncoderBlock:
    """Return a block of a stack, by the settings of a ViT."""
    biases = True if biased else ("out",)
    return EncoderBlock(
        MultiHeadAttention(config["num_attention_heads"], use_bias=biases, **fields),
        config["intermediate_size"], activation=activation(config, "hidden_act"),
        norm_epsilon=config["layer_norm_eps"],
    )  # fmt: skip


def image(
    config: Config, class_tokens: int = 0, biased: bool = True, patch_bias: bool = True,
    input_norm: bool = False,
) -> Classifier:  # fmt: skip
    """Return a stack over patches, with no head."""
    stack = Encoder(config["num_hidden_layers"], block(config, biased), input_norm=input_norm)
    embedding = PatchEmbedding(grid(config)[2:], config["hidden_size"], use_bias=patch_bias)
    return Classifier(embedding, stack, None, class_tokens=class_tokens)


def example(config: Config) -> np.ndarray:
    """Return an image of the size that the config names."""
    down, across, h, w = grid(config)
    return blank(1, down * h, across * w, config["num_channels"])
