"""Vision Transformers: ViT, DeiT, ViT-MSN, DINOv3, and those of timm and vit-pytorch."""

import math
from typing import Any, NamedTuple

import numpy as np

from flax_mha.interop.config import activation, grid, refuse
from flax_mha.interop.libraries import LIBRARIES
from flax_mha.interop.modules import classified
from flax_mha.interop.settings import Config, filled, shown
from flax_mha.interop.table import (
    PROJECTIONS,
    Family,
    Row,
    attention,
    each,
    linear,
    norm,
    patches,
    when,
    wrapped,
)
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Classifier
from flax_mha.models.blocks import EncoderBlock
from flax_mha.models.embeddings import PatchEmbedding
from flax_mha.models.stacks import Encoder
from flax_mha.positions import Axial

_OURS = "encoder/layers_{}"


class Kind(NamedTuple):
    """The record of a model type.

    Attributes:
      prefix: what models that wrap it put before all names.
      is_distilled: whether it has one more token, of distillation.
    """

    prefix: str
    is_distilled: bool = False


KINDS = {
    "vit": Kind("vit."),
    "deit": Kind("deit.", is_distilled=True),
    "vit_msn": Kind("vit."),
}


def vit(config: Config) -> Family:
    """Return the family of `ViTModel`, `ViTMSNModel` or `DeiTModel`, or of a classifier of these.

    DeiT has one more token, of distillation.
    """
    kind = KINDS[config["model_type"]]
    biased = config.get("qkv_bias", True)
    at = "encoder.layer.{}"
    names = ("attention.query", "attention.key", "attention.value", "output.dense")
    kernel = patches(*grid(config).patch)
    distilled = Row("embeddings.distillation_token", "class_tokens", wrapped(1), part=(1, 2))
    rows = [
        Row("embeddings.cls_token", "class_tokens", wrapped(1), part=(0, 1)),
        *when(kind.is_distilled, distilled),
        Row("embeddings.position_embeddings", "positions/embedding", wrapped(1)),
        *linear("embeddings.patch_embeddings.projection", "embedding/patches", axes=kernel),
        *each(config["num_hidden_layers"], [
            *attention(f"{at}.attention", f"{_OURS}/attention", names, (*[biased] * 3, True)),
            *norm(f"{at}.layernorm_before", f"{_OURS}/attention_norm"),
            *norm(f"{at}.layernorm_after", f"{_OURS}/mlp_norm"),
            *linear(f"{at}.intermediate.dense", f"{_OURS}/mlp/up"),
            *linear(f"{at}.output.dense", f"{_OURS}/mlp/down"),
        ]),
        *norm("layernorm", "encoder/norm"),
    ]  # fmt: skip
    module = image(config, class_tokens=2 if kind.is_distilled else 1, biased=biased)
    heads = ("*classifier.*", "pooler.*", "embeddings.mask_token")
    family = Family(module, (example(config),), rows, heads=heads, prefix=kind.prefix)
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
    embedding = PatchEmbedding(grid(config).patch, config["hidden_size"], use_bias=patch_bias)
    return Classifier(embedding, stack, None, class_tokens=class_tokens)


def example(config: Config) -> np.ndarray:
    """Return an image of the size that the config names."""
    return grid(config).image(config["num_channels"])


def dinov3(config: Config) -> Family:
    """Return the family of `DINOv3ViTModel`, for images of the size that the config names."""
    size = grid(config)
    count = 1 + config["num_register_tokens"]
    base = (config.get("rope_parameters") or config)["rope_theta"]
    gated, mlp_bias = config.get("use_gated_mlp", False), config.get("mlp_bias", True)
    settings = ("query", "key", "value", "proj")
    biases = [config.get(f"{name}_bias", name != "key") for name in settings]
    layer = MultiHeadAttention(
        config["num_attention_heads"],
        use_bias=tuple(x for x, biased in zip(PROJECTIONS, biases, strict=True) if biased),
        rotary=Axial((size.rows, size.columns), base, span=2 * math.pi, prefix=count),
    )
    block = EncoderBlock(
        layer, config["intermediate_size"], activation=activation(config, "hidden_act"),
        gated=gated, mlp_bias=mlp_bias, norm_epsilon=config["layer_norm_eps"],
        layer_scale=config.get("layerscale_value", 1.0),
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding(size.patch, config["hidden_size"]),
        Encoder(config["num_hidden_layers"], block), None, positions="none", class_tokens=count,
    )  # fmt: skip
    at, names = "model.layer.{}", ("q_proj", "k_proj", "v_proj", "o_proj")
    rows = [
        Row("embeddings.cls_token", "class_tokens", wrapped(1), part=(0, 1)),
        Row("embeddings.register_tokens", "class_tokens", wrapped(1), part=(1, count)),
        *linear("embeddings.patch_embeddings", "embedding/patches", axes=patches(*size.patch)),
        *each(config["num_hidden_layers"], [
            *attention(f"{at}.attention", f"{_OURS}/attention", names, biases),
            *norm(f"{at}.norm1", f"{_OURS}/attention_norm"),
            *norm(f"{at}.norm2", f"{_OURS}/mlp_norm"),
            *when(gated, *linear(f"{at}.mlp.gate_proj", f"{_OURS}/mlp/gate", mlp_bias)),
            *linear(f"{at}.mlp.up_proj", f"{_OURS}/mlp/up", mlp_bias),
            *linear(f"{at}.mlp.down_proj", f"{_OURS}/mlp/down", mlp_bias),
            Row(f"{at}.layer_scale1.lambda1", f"{_OURS}/attention_scale"),
            Row(f"{at}.layer_scale2.lambda1", f"{_OURS}/mlp_scale"),
        ]),
        *norm("norm", "encoder/norm"),
    ]  # fmt: skip
    # Names of the first checkpoints have no "model." before the layers.
    mask = ("embeddings.mask_token",)
    return Family(
        module, (size.image(config.get("num_channels", 3)),), rows, heads=mask, prefix="model."
    )


def timm_vit(config: Config) -> Family:
    """Return the family of timm's `VisionTransformer`, by its arguments, names and defaults.

    With num_classes=0 the features of all tokens, as `forward_features` gives them.
    """
    refuse(
        config, global_pool="token", qk_norm=False, scale_attn_norm=False, scale_mlp_norm=False,
        proj_bias=True, class_token=True, pos_embed="learn", no_embed_class=False, final_norm=True,
        fc_norm=None, embed_norm_layer=None, norm_layer=None, embed_layer=None, block_fn=None,
        attn_layer=None, mlp_layer=None,
    )  # fmt: skip
    config = filled(
        config, img_size=224, patch_size=16, num_classes=1000, embed_dim=768, depth=12,
        num_heads=12, mlp_ratio=4.0, qkv_bias=True, reg_tokens=0, pre_norm=False, act_layer="gelu",
        in_chans=3,
    )  # fmt: skip
    D, pre_norm, count = config["embed_dim"], config["pre_norm"], 1 + config["reg_tokens"]
    size, scale, biased = (
        grid(config, "img_size"),
        config.get("init_values") or None,
        config["qkv_bias"],
    )
    block = EncoderBlock(
        MultiHeadAttention(config["num_heads"], use_bias=biased or ("out",)),
        int(D * config["mlp_ratio"]), activation=activation(config, "act_layer"),
        layer_scale=scale,
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding(size.patch, D, use_bias=not pre_norm),
        Encoder(config["depth"], block, input_norm=pre_norm), config["num_classes"] or None,
        class_tokens=count, pooling="first",
    )  # fmt: skip
    at, names, biases = "blocks.{}", LIBRARIES["timm"].names, (*[biased] * 3, True)
    kernel = patches(*size.patch)
    rows = [
        Row("cls_token", "class_tokens", wrapped(1), part=(0, 1)),
        *when(count > 1, Row("reg_token", "class_tokens", wrapped(1), part=(1, count))),
        Row("pos_embed", "positions/embedding", wrapped(1)),
        *linear("patch_embed.proj", "embedding/patches", not pre_norm, axes=kernel),
        *when(pre_norm, *norm("norm_pre", "encoder/input_norm")),
        *each(config["depth"], [
            *norm(f"{at}.norm1", f"{_OURS}/attention_norm"),
            *attention(f"{at}.attn", f"{_OURS}/attention", names, biases),
            *when(scale is not None, Row(f"{at}.ls1.gamma", f"{_OURS}/attention_scale")),
            *norm(f"{at}.norm2", f"{_OURS}/mlp_norm"),
            *linear(f"{at}.mlp.fc1", f"{_OURS}/mlp/up"),
            *linear(f"{at}.mlp.fc2", f"{_OURS}/mlp/down"),
            *when(scale is not None, Row(f"{at}.ls2.gamma", f"{_OURS}/mlp_scale")),
        ]),
        *norm("norm", "encoder/norm"),
        *when(config["num_classes"], *linear("head", "head")),
    ]  # fmt: skip
    return Family(module, (size.image(config["in_chans"]),), rows)


def vit_pytorch(config: Config) -> Family:
    """Return the family of `vit_pytorch.ViT`, by its arguments, names and defaults.

    With num_classes=0 the features of all tokens.
    """
    config = filled(config, pool="cls", channels=3, dim_head=64)
    D, heads, has_token = config["dim"], config["heads"], config["pool"] == "cls"
    if config["pool"] not in ("cls", "mean"):
        raise ValueError(f"the config's pool must be 'cls' or 'mean', got {shown(config['pool'])}")
    if heads == 1 and config["dim_head"] == D:
        raise ValueError(
            f"the config's heads=1 with dim_head={D} leaves out the projection of what heads give, "
            f"and ours always has it; give more heads, or another dim_head"
        )
    size = grid(config)
    block = EncoderBlock(
        MultiHeadAttention(heads, head_dim=config["dim_head"], use_bias=("out",)),
        config["mlp_dim"], activation="gelu_exact", norm_epsilon=1e-5,
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding(size.patch, D, norm_epsilon=1e-5), Encoder(config["depth"], block),
        config["num_classes"] or None, class_tokens=int(has_token),
        pooling="first" if has_token else "mean",
    )  # fmt: skip
    names, biases = LIBRARIES["vit-pytorch"].names, (False, False, False, True)
    patch, at = "to_patch_embedding", "transformer.layers.{}"
    rows = [
        *norm(f"{patch}.1", "embedding/patches_norm"),
        *linear(f"{patch}.2", "embedding/patches"),
        *norm(f"{patch}.3", "embedding/norm"),
        *when(has_token, Row("cls_token", "class_tokens")),
        Row("pos_embedding", "positions/embedding"),
        *each(config["depth"], [
            *norm(f"{at}.0.norm", f"{_OURS}/attention_norm"),
            *attention(f"{at}.0", f"{_OURS}/attention", names, biases),
            *norm(f"{at}.1.net.0", f"{_OURS}/mlp_norm"),
            *linear(f"{at}.1.net.1", f"{_OURS}/mlp/up"),
            *linear(f"{at}.1.net.4", f"{_OURS}/mlp/down"),
        ]),
        *norm("transformer.norm", "encoder/norm"),
        *when(config["num_classes"], *linear("mlp_head", "head")),
    ]  # fmt: skip
    # With pool="mean" theirs is empty.
    ignored = () if has_token else ("cls_token",)
    return Family(module, (size.image(config["channels"]),), rows, ignored)
