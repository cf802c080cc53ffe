"""Vision Transformers: ViT, DeiT, ViT-MSN, DINOv2 and 3, and those of timm and vit-pytorch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flax_mha.interop import table
from flax_mha.interop.checked_config import Config, filled
from flax_mha.interop.libraries import LIBRARIES
from flax_mha.interop.modules import classified
from flax_mha.interop.shared_settings import activation, choice, example_image, grid, refuse
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Classifier, Encoder, PatchEmbedding
from flax_mha.models.blocks import EncoderBlock
from flax_mha.positions import Axial

_BLOCK = "encoder/layers_{}"
_HEADS = ("attention.query", "attention.key", "attention.value", "output.dense")
# The prefix of all names in models that wrap a type.
_PREFIXES = {"vit": "vit.", "deit": "deit.", "vit_msn": "vit."}
_DINO = {
    "norm1": "attention_norm", "layer_scale1.lambda1": "attention_scale",
    "norm2": "mlp_norm", "layer_scale2.lambda1": "mlp_scale",
}  # fmt: skip


def block(config: Config, biased: bool = True, **fields: Any) -> EncoderBlock:
    """Return a block by a ViT's config, with more fields of the attention layer."""
    return EncoderBlock(
        MultiHeadAttention(config["num_attention_heads"], use_bias=biased or ("out",), **fields),
        config["intermediate_size"], activation=activation(config, "hidden_act"),
        norm_epsilon=config["layer_norm_eps"],
    )  # fmt: skip


def image(
    config: Config, class_tokens: int = 0, biased: bool = True, patch_bias: bool = True,
    input_norm: bool = False,
) -> Classifier:  # fmt: skip
    """Return an encoder of image patches by a ViT's config, without an output head."""
    stack = Encoder(config["num_hidden_layers"], block(config, biased), input_norm=input_norm)
    embedding = PatchEmbedding(_patch(config), config["hidden_size"], use_bias=patch_bias)
    return Classifier(embedding, stack, None, class_tokens=class_tokens)


def _patch(config: Config) -> tuple[int, int]:
    height, width = grid(config)[1]
    return height, width


def _embeddings(
    patch: Sequence[int], patches: str, positions: str | None, tokens: Mapping[str, int],
    bias: bool = True,
) -> list[table.TensorRule]:  # fmt: skip
    """Return the rules of patches, positions and learned tokens, by their names.

    Each name in `tokens` has its number of tokens.
    """
    rows = table.linear(patches, "embedding/patches", bias, axes=table.patches(*patch))
    if positions is not None:
        rows.append(table.TensorRule(positions, "positions/embedding", table.wrapped(1)))
    start = 0
    for name, count in tokens.items():
        part = (start, start := start + count)
        rows.append(table.TensorRule(name, "class_tokens", table.wrapped(1), part=part))
    return rows


def vit(config: Config) -> table.Family:
    """Return the family of `ViTModel`, `ViTMSNModel` or `DeiTModel`, or of its classifier."""
    prefix, biased = _PREFIXES[config["model_type"]], config.get("qkv_bias", True)
    tokens, theirs = {"embeddings.cls_token": 1}, "embeddings.patch_embeddings.projection"
    tokens |= {"embeddings.distillation_token": 1} if prefix == "deit." else {}
    names = {
        "layernorm_before": "attention_norm", "layernorm_after": "mlp_norm",
        "intermediate.dense": "mlp/up", "output.dense": "mlp/down",
    }  # fmt: skip
    rows = [
        *_embeddings(_patch(config), theirs, "embeddings.position_embeddings", tokens),
        *table.stack(
            config["num_hidden_layers"], "encoder.layer.{}", "encoder", {"attention": "attention"},
            _HEADS, names, (*[biased] * 3, True),
        ),
        *table.norm("layernorm", "encoder/norm"),
    ]  # fmt: skip
    family = table.Family(
        image(config, class_tokens=len(tokens), biased=biased),
        (example_image(config, config["num_channels"]),), rows,
        heads=("*classifier.*", "pooler.*", "embeddings.mask_token"),
        prefix=prefix,
    )  # fmt: skip
    return classified(config, family)


def dinov2(config: Config) -> table.Family:
    """Return the family of `Dinov2Model`, with registers or without, or of its classifier.

    Images have the config's size, as positions are not interpolated.
    """
    D, count = config["hidden_size"], config["num_hidden_layers"]
    has_registers = config["model_type"] == "dinov2_with_registers"
    registers = config.get("num_register_tokens", 4) if has_registers else 0
    biased, gated = config.get("qkv_bias", True), config.get("use_swiglu_ffn", False)
    act, hidden = activation(config, "hidden_act"), int(D * config.get("mlp_ratio", 4))
    linears = {"mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down"}
    if gated:
        # Two thirds of an MLP's hidden features, rounded up to a multiple of 8.
        act, hidden = "silu", -(int(hidden * 2 / 3) // -8) * 8
        linears = {"mlp.weights_out": "mlp/down"}
    block = EncoderBlock(
        MultiHeadAttention(config["num_attention_heads"], use_bias=biased or ("out",)), hidden,
        activation=act, gated=gated, norm_epsilon=config["layer_norm_eps"],
        layer_scale=config.get("layerscale_value", 1.0),
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding(_patch(config), D), Encoder(count, block), None, class_tokens=1,
        register_tokens=registers,
    )  # fmt: skip
    layer, theirs = "encoder.layer.{}", "embeddings.patch_embeddings.projection"
    rows = [
        *_embeddings(
            _patch(config), theirs, "embeddings.position_embeddings", {"embeddings.cls_token": 1}
        ),
        *table.when(registers, table.TensorRule(
            "embeddings.register_tokens", "register_tokens", table.wrapped(1)
        )),
        *table.stack(
            count, layer, "encoder", {"attention": "attention"}, _HEADS, linears | _DINO,
            (*[biased] * 3, True),
        ),
        *table.when(gated, *table.per_layer(count, table.linear(
            f"{layer}.mlp.weights_in", (f"{_BLOCK}/mlp/gate", f"{_BLOCK}/mlp/up")
        ))),
        *table.norm("layernorm", "encoder/norm"),
    ]  # fmt: skip
    family = table.Family(
        module, (example_image(config, config.get("num_channels", 3)),), rows,
        heads=("classifier.*", "embeddings.mask_token"), prefix=f"{config['model_type']}.",
    )  # fmt: skip
    return classified(config, family, pooling="first_and_mean")


def dinov3(config: Config) -> table.Family:
    """Return the family of `DINOv3ViTModel`, for images of the config's size."""
    (rows, columns), _ = grid(config)
    registers = config["num_register_tokens"]
    base = (config.get("rope_parameters") or config)["rope_theta"]
    gated, mlp_bias = config.get("use_gated_mlp", False), config.get("mlp_bias", True)
    settings = ("query", "key", "value", "proj")
    biases = [config.get(f"{name}_bias", name != "key") for name in settings]
    attention = MultiHeadAttention(
        config["num_attention_heads"],
        use_bias=tuple(x for x, biased in zip(table.PROJECTIONS, biases, strict=True) if biased),
        rotary=Axial((rows, columns), base, span=2 * math.pi, prefix=1 + registers),
    )
    block = EncoderBlock(
        attention, config["intermediate_size"], activation=activation(config, "hidden_act"),
        gated=gated, mlp_bias=mlp_bias, norm_epsilon=config["layer_norm_eps"],
        layer_scale=config.get("layerscale_value", 1.0),
    )  # fmt: skip
    count, layer = config["num_hidden_layers"], "layer.{}"
    module = Classifier(
        PatchEmbedding(_patch(config), config["hidden_size"]), Encoder(count, block), None,
        positions="none", class_tokens=1 + registers,
    )  # fmt: skip
    tokens = {"embeddings.cls_token": 1, "embeddings.register_tokens": registers}
    linears = {"gate_proj": "gate"} if gated else {}
    # transformers 5 writes "model." first, and reads both forms.
    return table.Family(
        module, (example_image(config, config.get("num_channels", 3)),),
        [
            *_embeddings(_patch(config), "embeddings.patch_embeddings", None, tokens),
            *table.per_layer(count, [
                *table.attention(
                    f"{layer}.attention", f"{_BLOCK}/attention",
                    ("q_proj", "k_proj", "v_proj", "o_proj"), biases,
                ),
                *table.parts(layer, _BLOCK, _DINO),
                *table.parts(f"{layer}.mlp", f"{_BLOCK}/mlp", linears | {
                    "up_proj": "up", "down_proj": "down"
                }, mlp_bias),
            ]),
            *table.norm("norm", "encoder/norm"),
        ],
        heads=("embeddings.mask_token",), prefix="model.",
    )  # fmt: skip


def timm_vit(config: Config) -> table.Family:
    """Return the family of timm's `VisionTransformer`, with its arguments, names and defaults.

    With num_classes=0 the output is what `forward_features` returns, the features of all tokens.
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
    D, pre_norm, registers = config["embed_dim"], config["pre_norm"], config["reg_tokens"]
    (height, width), biased = grid(config, "img_size")[1], config["qkv_bias"]
    scale = config.get("init_values") or None
    block = EncoderBlock(
        MultiHeadAttention(config["num_heads"], use_bias=biased or ("out",)),
        int(D * config["mlp_ratio"]), activation=activation(config, "act_layer"),
        layer_scale=scale,
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding((height, width), D, use_bias=not pre_norm),
        Encoder(config["depth"], block, input_norm=pre_norm), config["num_classes"] or None,
        class_tokens=1 + registers, pooling="first",
    )  # fmt: skip
    names = {
        "norm1": "attention_norm", "norm2": "mlp_norm", "mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down"
    }  # fmt: skip
    names |= {} if scale is None else {"ls1.gamma": "attention_scale", "ls2.gamma": "mlp_scale"}
    tokens = {"cls_token": 1} | ({"reg_token": registers} if registers else {})
    rows = [
        *_embeddings((height, width), "patch_embed.proj", "pos_embed", tokens, not pre_norm),
        *table.when(pre_norm, *table.norm("norm_pre", "encoder/input_norm")),
        *table.stack(
            config["depth"], "blocks.{}", "encoder", {"attn": "attention"},
            LIBRARIES["timm"].names, names, (*[biased] * 3, True),
        ),
        *table.norm("norm", "encoder/norm"),
        *table.when(config["num_classes"], *table.linear("head", "head")),
    ]  # fmt: skip
    return table.Family(module, (example_image(config, config["in_chans"], "img_size"),), rows)


def vit_pytorch(config: Config) -> table.Family:
    """Return the family of `vit_pytorch.ViT`, with its arguments, names and defaults.

    With num_classes=0 the output is the features of all tokens.
    """
    config = filled(config, channels=3, dim_head=64)
    D, heads = config["dim"], config["heads"]
    has_token = choice(config, "pool", {"cls": True, "mean": False}, "cls")
    projects = heads > 1 or config["dim_head"] != D
    block = EncoderBlock(
        MultiHeadAttention(
            heads, head_dim=config["dim_head"], use_bias=("out",), project_out=projects
        ),
        config["mlp_dim"], activation="gelu_exact", norm_epsilon=1e-5,
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding(_patch(config), D, norm_epsilon=1e-5), Encoder(config["depth"], block),
        config["num_classes"] or None, class_tokens=int(has_token),
        pooling="first" if has_token else "mean",
    )  # fmt: skip
    layer, names = "transformer.layers.{}", LIBRARIES["vit-pytorch"].names[: 3 + projects]
    rows = [
        *table.parts("to_patch_embedding", "embedding", {
            "1": "patches_norm", "2": "patches", "3": "norm"
        }),
        *table.when(has_token, table.TensorRule("cls_token", "class_tokens")),
        table.TensorRule("pos_embedding", "positions/embedding"),
        *table.stack(config["depth"], layer, "encoder", {"0": "attention"}, names, {
            "0.norm": "attention_norm", "1.net.0": "mlp_norm", "1.net.1": "mlp/up",
            "1.net.4": "mlp/down",
        }, (False, False, False, True)),
        *table.norm("transformer.norm", "encoder/norm"),
        *table.when(config["num_classes"], *table.linear("mlp_head", "head")),
    ]  # fmt: skip
    # With pool="mean" this tensor is there, and empty.
    empty = {} if has_token else {"cls_token": (0, D)}
    return table.Family(
        module, (example_image(config, config["channels"]),), rows, (*empty,), empty=empty
    )
