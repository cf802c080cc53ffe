"""Vision Transformers: ViT, DeiT, ViT-MSN, DINOv2 and 3, and those of timm and vit-pytorch."""

import math
from collections.abc import Mapping
from typing import Any

from flax_mha.interop.checked_config import Config, filled
from flax_mha.interop.modules import classified
from flax_mha.interop.shared_settings import block, choice, example_image, grid
from flax_mha.interop.table import (
    PROJECTIONS,
    WRAPPED,
    Family,
    TensorRule,
    linear,
    norm,
    parts,
    patches,
    per_layer,
)  # fmt: skip
from flax_mha.models import Classifier, Encoder, PatchEmbedding
from flax_mha.models.blocks import EncoderBlock
from flax_mha.positions import Axial

_HEADS = {
    "attention.attention.query": "attention/query", "attention.attention.key": "attention/key",
    "attention.attention.value": "attention/value", "attention.output.dense": "attention/out",
}  # fmt: skip
_VIT = _HEADS | {
    "layernorm_before": "attention_norm", "layernorm_after": "mlp_norm",
    "intermediate.dense": "mlp/up", "output.dense": "mlp/down",
}  # fmt: skip
_DINO = {
    "norm1": "attention_norm", "layer_scale1.lambda1": "attention_scale",
    "norm2": "mlp_norm", "layer_scale2.lambda1": "mlp_scale",
}  # fmt: skip
_DINO3 = _DINO | {
    "attention.q_proj": "attention/query", "attention.k_proj": "attention/key",
    "attention.v_proj": "attention/value", "attention.o_proj": "attention/out",
    "mlp.gate_proj": "mlp/gate", "mlp.up_proj": "mlp/up", "mlp.down_proj": "mlp/down",
}  # fmt: skip
_TIMM = {
    "attn.qkv": ("attention/query", "attention/key", "attention/value"),
    "attn.proj": "attention/out", "norm1": "attention_norm", "norm2": "mlp_norm",
    "mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down", "ls1.gamma": "attention_scale",
    "ls2.gamma": "mlp_scale",
}  # fmt: skip
_VIT_PYTORCH = {
    "0.norm": "attention_norm", "0.to_out.0": "attention/out",
    "0.to_qkv": ("attention/query", "attention/key", "attention/value"),
    "1.net.0": "mlp_norm", "1.net.1": "mlp/up", "1.net.4": "mlp/down",
}  # fmt: skip
# Heads, and a token of training.
_LEFT = ("*classifier.*", "pooler.*", "embeddings.mask_token")


def image(
    config: Config, block: EncoderBlock, input_norm: bool = False,
    norm_epsilon: float | None = None, num_classes: int | None = None, **fields: Any,
) -> Classifier:  # fmt: skip
    """Return an encoder of image patches by a ViT's config, with more fields of `Classifier`.

    With a norm before the first block (CLIP), the patches' projection has no bias.
    """
    _, (height, width) = grid(config)
    embedding = PatchEmbedding(
        (height, width), config["hidden_size"], use_bias=not input_norm, norm_epsilon=norm_epsilon
    )
    stack = Encoder(config["num_hidden_layers"], block, input_norm=input_norm)
    return Classifier(embedding, stack, num_classes, **fields)


def embeddings(
    config: Config, tokens: Mapping[str, int],
    projection: str = "embeddings.patch_embeddings.projection",
    positions: str = "embeddings.position_embeddings",
) -> list[TensorRule]:  # fmt: skip
    """Return the rules of patches, positions and numbers of learned tokens, by their names."""
    layout, start = patches(*grid(config)[1]), 0
    rows = linear(projection, "embedding/patches", lambda _: layout)
    rows.append(TensorRule(positions, "positions/embedding", WRAPPED))
    for name, count in tokens.items():
        part = slice(start, start := start + count)
        rows.append(TensorRule(name, "class_tokens", WRAPPED, part=part))
    return rows


def _stack(config: Config, layer: str, names: Mapping[str, Any], last: str) -> list[TensorRule]:
    """Return the rules of a stack and its last norm."""
    layers = parts(layer, "encoder/layers_{}", names)
    return per_layer(config["num_hidden_layers"], layers) + norm(last, "encoder/norm")


def vit(config: Config) -> Family:
    """Return the family of `ViTModel`, `ViTMSNModel` or `DeiTModel`, or of its classifier."""
    kind = config["model_type"]
    tokens = {"embeddings.cls_token": 1}
    tokens |= {"embeddings.distillation_token": 1} if kind == "deit" else {}
    rows = [
        *embeddings(config, tokens),
        *_stack(config, "encoder.layer.{}", _VIT, "layernorm"),
    ]
    one = block(config, config.get("qkv_bias", True) or ("out",))
    family = Family(
        image(config, one, class_tokens=len(tokens)), example_image(config), rows,
        heads=_LEFT, prefix="deit." if kind == "deit" else "vit.",
    )  # fmt: skip
    return classified(config, family)


def dinov2(config: Config) -> Family:
    """Return the family of `Dinov2Model`, with registers or without, or of its classifier.

    Images have the config's size, as positions are not interpolated.
    """
    D, kind = config["hidden_size"], config["model_type"]
    registers = config.get("num_register_tokens", 4) if kind == "dinov2_with_registers" else 0
    biases, gated = config.get("qkv_bias", True) or ("out",), config.get("use_swiglu_ffn", False)
    names: dict[str, Any] = _HEADS | _DINO
    hidden = int(D * config.get("mlp_ratio", 4))
    options: dict[str, Any] = {"layer_scale": config.get("layerscale_value", 1.0)}
    if gated:
        # Two thirds of an MLP's hidden features, rounded up to a multiple of 8.
        hidden = -(int(hidden * 2 / 3) // -8) * 8
        options |= {"activation": "silu", "gated": True}
        names |= {"mlp.weights_in": ("mlp/gate", "mlp/up"), "mlp.weights_out": "mlp/down"}
    else:
        names |= {"mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down"}
    one = block(filled(config, intermediate_size=hidden), biases).clone(**options)
    rows = [
        *embeddings(config, {"embeddings.cls_token": 1}),
        TensorRule("embeddings.register_tokens", "register_tokens", WRAPPED),
        *_stack(config, "encoder.layer.{}", names, "layernorm"),
    ]  # fmt: skip
    module = image(config, one, class_tokens=1, register_tokens=registers)
    family = Family(
        module, example_image(config), rows, heads=_LEFT,
        prefix=f"{kind}.",
    )  # fmt: skip
    return classified(config, family, pooling="first_and_mean")


def dinov3(config: Config) -> Family:
    """Return the family of `DINOv3ViTModel`, for images of the config's size."""
    (rows, columns), _ = grid(config)
    registers = config["num_register_tokens"]
    base = (config.get("rope_parameters") or config)["rope_theta"]
    settings = dict(zip(PROJECTIONS, ("query", "key", "value", "proj"), strict=True))
    biases = [x for x, name in settings.items() if config.get(f"{name}_bias", name != "key")]
    rotation = Axial((rows, columns), base, span=2 * math.pi, prefix=1 + registers)
    one = block(config, tuple(biases), rotary=rotation).clone(
        gated=config.get("use_gated_mlp", False), mlp_bias=config.get("mlp_bias", True),
        layer_scale=config.get("layerscale_value", 1.0),
    )  # fmt: skip
    tokens = {"embeddings.cls_token": 1, "embeddings.register_tokens": registers}
    # transformers 5 writes "model." first, and reads both forms.
    return Family(
        image(config, one, positions="none", class_tokens=1 + registers), example_image(config),
        [
            *embeddings(config, tokens, "embeddings.patch_embeddings"),
            *_stack(config, "layer.{}", _DINO3, "norm"),
        ],
        heads=_LEFT, prefix="model.",
    )  # fmt: skip


def timm_vit(config: Config) -> Family:
    """Return the family of timm's `VisionTransformer`, with its arguments, names and defaults.

    With num_classes=0 the output is what `forward_features` returns, the features of all tokens.
    """
    D, pre_norm = config.get("embed_dim", 768), config.get("pre_norm", False)
    config = filled(
        config, patch_size=16, layer_norm_eps=1e-6, image_size=config.get("img_size", 224),
        hidden_size=D, num_hidden_layers=config.get("depth", 12),
        hidden_act=config.get("act_layer", "gelu"),
        num_attention_heads=config.get("num_heads", 12), num_channels=config.get("in_chans", 3),
        intermediate_size=int(D * config.get("mlp_ratio", 4.0)),
    )  # fmt: skip
    registers, biases = config.get("reg_tokens", 0), config.get("qkv_bias", True) or ("out",)
    one = block(config, biases).clone(layer_scale=config.get("init_values") or None)
    tokens = {"cls_token": 1} | ({"reg_token": registers} if registers else {})
    module = image(
        config, one, pre_norm, num_classes=config.get("num_classes", 1000) or None,
        class_tokens=1 + registers, pooling="first",
    )  # fmt: skip
    rows = [
        *embeddings(config, tokens, "patch_embed.proj", "pos_embed"),
        *norm("norm_pre", "encoder/input_norm"),
        *_stack(config, "blocks.{}", _TIMM, "norm"),
        *linear("head", "head"),
    ]
    return Family(module, example_image(config), rows)


def vit_pytorch(config: Config) -> Family:
    """Return the family of `vit_pytorch.ViT`, with its arguments, names and defaults.

    With num_classes=0 the output is the features of all tokens.
    """
    D, heads, head_dim = config["dim"], config["heads"], config.get("dim_head", 64)
    has_token = choice(config, "pool", {"cls": True, "mean": False}, "cls")
    config = filled(
        config, hidden_size=D, num_hidden_layers=config["depth"], num_attention_heads=heads,
        intermediate_size=config["mlp_dim"], hidden_act="gelu", layer_norm_eps=1e-5,
        num_channels=config.get("channels", 3),
    )  # fmt: skip
    projects = heads > 1 or head_dim != D
    one = block(config, ("out",), head_dim=head_dim, project_out=projects)
    module = image(
        config, one, norm_epsilon=1e-5, num_classes=config["num_classes"] or None,
        class_tokens=int(has_token), pooling="first" if has_token else "mean",
    )  # fmt: skip
    rows = [
        *parts("to_patch_embedding", "embedding", {
            "1": "patches_norm", "2": "patches", "3": "norm"
        }),
        TensorRule("cls_token", "class_tokens"),
        TensorRule("pos_embedding", "positions/embedding"),
        *_stack(config, "transformer.layers.{}", _VIT_PYTORCH, "transformer.norm"),
        *linear("mlp_head", "head"),
    ]  # fmt: skip
    # With pool="mean" this tensor is there, and empty.
    return Family(module, example_image(config), rows, () if has_token else ("cls_token",))
