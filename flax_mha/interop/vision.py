"""Vision Transformers: ViT, DeiT, ViT-MSN, DINOv2 and 3, and those of timm and vit-pytorch."""

import math
from typing import Any

from flax_mha.interop import table
from flax_mha.interop.checked_config import Config, filled, shown
from flax_mha.interop.libraries import LIBRARIES
from flax_mha.interop.modules import classified
from flax_mha.interop.shared_settings import activation, grid, refuse
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Classifier, Encoder, PatchEmbedding
from flax_mha.models.blocks import EncoderBlock
from flax_mha.positions import Axial

_BLOCK = "encoder/layers_{}"
_HEADS = ("attention.query", "attention.key", "attention.value", "output.dense")
# The prefix of all names in models that wrap a type, and the tokens before its patches.
PREFIXES = {"vit": "vit.", "deit": "deit.", "vit_msn": "vit."}
TOKENS = {"vit": ("cls",), "deit": ("cls", "distillation"), "vit_msn": ("cls",)}


def vit(config: Config) -> table.Family:
    """Return the family of `ViTModel`, `ViTMSNModel` or `DeiTModel`, or of its classifier."""
    tokens, prefix = TOKENS[config["model_type"]], PREFIXES[config["model_type"]]
    biased = config.get("qkv_bias", True)
    size = grid(config)
    kernel, images = table.patches(*size.patch), size.image(config["num_channels"])
    names = {
        "layernorm_before": "attention_norm", "layernorm_after": "mlp_norm",
        "intermediate.dense": "mlp/up", "output.dense": "mlp/down",
    }  # fmt: skip
    rows = [
        *(_tokens(f"embeddings.{name}_token", i, i + 1) for i, name in enumerate(tokens)),
        table.TensorRule("embeddings.position_embeddings", "positions/embedding", table.wrapped(1)),
        *table.linear("embeddings.patch_embeddings.projection", "embedding/patches", axes=kernel),
        *table.stack(
            config["num_hidden_layers"], "encoder.layer.{}", "encoder", {"attention": "attention"},
            _HEADS, names, (*[biased] * 3, True),
        ),
        *table.norm("layernorm", "encoder/norm"),
    ]  # fmt: skip
    module = image(config, class_tokens=len(tokens), biased=biased)
    unused = ("*classifier.*", "pooler.*", "embeddings.mask_token")
    family = table.Family(module, (images,), rows, heads=unused, prefix=prefix)
    return classified(config, family)


def dinov2(config: Config) -> table.Family:
    """Return the family of `Dinov2Model`, with registers or without, or of its classifier.

    Images have the config's size: the position table is not interpolated to others.
    """
    size, D = grid(config), config["hidden_size"]
    has_registers = config["model_type"] == "dinov2_with_registers"
    registers = config.get("num_register_tokens", 4) if has_registers else 0
    biased, gated = config.get("qkv_bias", True), config.get("use_swiglu_ffn", False)
    act, hidden = activation(config, "hidden_act"), int(D * config.get("mlp_ratio", 4))
    if gated:
        # Two thirds of an MLP's hidden features, rounded up to a multiple of 8.
        act, hidden = "silu", -(int(hidden * 2 / 3) // -8) * 8
    block = EncoderBlock(
        MultiHeadAttention(config["num_attention_heads"], use_bias=biased or ("out",)), hidden,
        activation=act, gated=gated, norm_epsilon=config["layer_norm_eps"],
        layer_scale=config.get("layerscale_value", 1.0),
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding(size.patch, D), Encoder(config["num_hidden_layers"], block), None,
        class_tokens=1, register_tokens=registers,
    )  # fmt: skip
    kernel, layer = table.patches(*size.patch), "encoder.layer.{}"
    linears = {"mlp.weights_out": "mlp/down"} if gated else {
        "mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down"
    }  # fmt: skip
    names = linears | {
        "norm1": "attention_norm", "layer_scale1.lambda1": "attention_scale",
        "norm2": "mlp_norm", "layer_scale2.lambda1": "mlp_scale",
    }  # fmt: skip
    rows = [
        table.TensorRule("embeddings.cls_token", "class_tokens", table.wrapped(1)),
        *table.when(registers, table.TensorRule(
            "embeddings.register_tokens", "register_tokens", table.wrapped(1)
        )),
        table.TensorRule("embeddings.position_embeddings", "positions/embedding", table.wrapped(1)),
        *table.linear("embeddings.patch_embeddings.projection", "embedding/patches", axes=kernel),
        *table.stack(
            config["num_hidden_layers"], layer, "encoder", {"attention": "attention"}, _HEADS,
            names, (*[biased] * 3, True),
        ),
        *table.when(gated, *table.per_layer(config["num_hidden_layers"], table.linear(
            f"{layer}.mlp.weights_in", (f"{_BLOCK}/mlp/gate", f"{_BLOCK}/mlp/up")
        ))),
        *table.norm("layernorm", "encoder/norm"),
    ]  # fmt: skip
    family = table.Family(
        module, (size.image(config.get("num_channels", 3)),), rows,
        heads=("classifier.*", "embeddings.mask_token"), prefix=f"{config['model_type']}.",
    )  # fmt: skip
    return classified(config, family, pooling="first_and_mean")


def _tokens(name: str, start: int, stop: int) -> table.TensorRule:
    """Return the rule of a tensor that holds the learned tokens start … stop − 1."""
    return table.TensorRule(name, "class_tokens", table.wrapped(1), part=(start, stop))


def block(config: Config, biased: bool = True, **fields: Any) -> EncoderBlock:
    """Return a block by a ViT's config, with biases or not, and fields of the attention layer."""
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
    embedding = PatchEmbedding(grid(config).patch, config["hidden_size"], use_bias=patch_bias)
    return Classifier(embedding, stack, None, class_tokens=class_tokens)


def dinov3(config: Config) -> table.Family:
    """Return the family of `DINOv3ViTModel`, for images of the config's size."""
    size = grid(config)
    count = 1 + config["num_register_tokens"]
    base = (config.get("rope_parameters") or config)["rope_theta"]
    gated, mlp_bias = config.get("use_gated_mlp", False), config.get("mlp_bias", True)
    settings = ("query", "key", "value", "proj")
    biases = [config.get(f"{name}_bias", name != "key") for name in settings]
    attention = MultiHeadAttention(
        config["num_attention_heads"],
        use_bias=tuple(x for x, biased in zip(table.PROJECTIONS, biases, strict=True) if biased),
        rotary=Axial((size.rows, size.columns), base, span=2 * math.pi, prefix=count),
    )
    block = EncoderBlock(
        attention, config["intermediate_size"], activation=activation(config, "hidden_act"),
        gated=gated, mlp_bias=mlp_bias, norm_epsilon=config["layer_norm_eps"],
        layer_scale=config.get("layerscale_value", 1.0),
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding(size.patch, config["hidden_size"]),
        Encoder(config["num_hidden_layers"], block), None, positions="none", class_tokens=count,
    )  # fmt: skip
    kernel, layer = table.patches(*size.patch), "layer.{}"
    heads = ("q_proj", "k_proj", "v_proj", "o_proj")
    linears = {"gate_proj": "gate"} if gated else {}
    linears |= {"up_proj": "up", "down_proj": "down"}
    rows = [
        _tokens("embeddings.cls_token", 0, 1),
        _tokens("embeddings.register_tokens", 1, count),
        *table.linear("embeddings.patch_embeddings", "embedding/patches", axes=kernel),
        *table.per_layer(config["num_hidden_layers"], [
            *table.attention(f"{layer}.attention", f"{_BLOCK}/attention", heads, biases),
            *table.parts(layer, _BLOCK, {
                "norm1": "attention_norm", "layer_scale1.lambda1": "attention_scale",
                "norm2": "mlp_norm", "layer_scale2.lambda1": "mlp_scale",
            }),
            *table.parts(f"{layer}.mlp", f"{_BLOCK}/mlp", linears, mlp_bias),
        ]),
        *table.norm("norm", "encoder/norm"),
    ]  # fmt: skip
    # transformers 5 writes "model." in front of the layers' names, and reads both forms.
    return table.Family(
        module, (size.image(config.get("num_channels", 3)),), rows,
        heads=("embeddings.mask_token",), prefix="model.",
    )  # fmt: skip


def timm_vit(config: Config) -> table.Family:
    """Return the family of timm's `VisionTransformer`, with its arguments, names and defaults.

    With num_classes=0 the output is that of `forward_features`, the features of all tokens.
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
    size, biased = grid(config, "img_size"), config["qkv_bias"]
    scale = config.get("init_values") or None
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
    kernel = table.patches(*size.patch)
    names = {
        "norm1": "attention_norm", "norm2": "mlp_norm", "mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down"
    }  # fmt: skip
    names |= {} if scale is None else {"ls1.gamma": "attention_scale", "ls2.gamma": "mlp_scale"}
    rows = [
        _tokens("cls_token", 0, 1),
        *table.when(count > 1, _tokens("reg_token", 1, count)),
        table.TensorRule("pos_embed", "positions/embedding", table.wrapped(1)),
        *table.linear("patch_embed.proj", "embedding/patches", not pre_norm, axes=kernel),
        *table.when(pre_norm, *table.norm("norm_pre", "encoder/input_norm")),
        *table.stack(
            config["depth"], "blocks.{}", "encoder", {"attn": "attention"},
            LIBRARIES["timm"].names, names, (*[biased] * 3, True),
        ),
        *table.norm("norm", "encoder/norm"),
        *table.when(config["num_classes"], *table.linear("head", "head")),
    ]  # fmt: skip
    return table.Family(module, (size.image(config["in_chans"]),), rows)


def vit_pytorch(config: Config) -> table.Family:
    """Return the family of `vit_pytorch.ViT`, with its arguments, names and defaults.

    With num_classes=0 the output is the features of all tokens.
    """
    config = filled(config, pool="cls", channels=3, dim_head=64)
    D, heads, has_token = config["dim"], config["heads"], config["pool"] == "cls"
    if config["pool"] not in ("cls", "mean"):
        raise ValueError(f"the config's pool must be 'cls' or 'mean', got {shown(config['pool'])}")
    projects = heads > 1 or config["dim_head"] != D
    size = grid(config)
    block = EncoderBlock(
        MultiHeadAttention(
            heads, head_dim=config["dim_head"], use_bias=("out",), project_out=projects
        ),
        config["mlp_dim"], activation="gelu_exact", norm_epsilon=1e-5,
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding(size.patch, D, norm_epsilon=1e-5), Encoder(config["depth"], block),
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
    return table.Family(module, (size.image(config["channels"]),), rows, (*empty,), empty=empty)
