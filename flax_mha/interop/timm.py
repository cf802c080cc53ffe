"""The Vision Transformers of timm, whose configs are the arguments of `VisionTransformer`."""

from flax_mha.interop.config import activation, blank, grid, refuse
from flax_mha.interop.libraries import LIBRARIES
from flax_mha.interop.settings import Config, filled
from flax_mha.interop.table import Family, Row, attention, each, linear, norm, patches, wrapped
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Classifier
from flax_mha.models.blocks import EncoderBlock
from flax_mha.models.embeddings import PatchEmbedding
from flax_mha.models.stacks import Encoder


def timm_vit(config: Config) -> Family:
    """Of `VisionTransformer`, by its arguments under their names and with their defaults.

    With num_classes=0 the features of all tokens, as `forward_features` gives them.
    """
    refuse(
        config, global_pool="token", qk_norm=False, scale_attn_norm=False, scale_mlp_norm=False,
        proj_bias=True, class_token=True, pos_embed="learn", no_embed_class=False, final_norm=True,
        fc_norm=None, embed_norm_layer=None, norm_layer=None, embed_layer=None, block_fn=None,
        attn_layer=None, mlp_layer=None,
    )  # fmt: skip
    given = filled(
        config, img_size=224, patch_size=16, num_classes=1000, embed_dim=768, depth=12,
        num_heads=12, mlp_ratio=4.0, qkv_bias=True, reg_tokens=0, pre_norm=False, act_layer="gelu",
        in_chans=3,
    )  # fmt: skip
    D, first, count = given["embed_dim"], given["pre_norm"], 1 + given["reg_tokens"]
    down, across, h, w = grid(given, "img_size")
    layer = MultiHeadAttention(given["num_heads"], use_bias=given["qkv_bias"] or ("out",))
    scale = given.get("init_values") or None
    block = EncoderBlock(
        layer, int(D * given["mlp_ratio"]), activation=activation(given, "act_layer"),
        layer_scale=scale,
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding((h, w), D, use_bias=not first),
        Encoder(given["depth"], block, input_norm=first), given["num_classes"] or None,
        class_tokens=count, pooling="first",
    )  # fmt: skip
    names, biases = LIBRARIES["timm"].names, (*(bool(given["qkv_bias"]),) * 3, True)
    theirs, ours = "blocks.{}", "encoder/layers_{}"
    rows = [
        Row("cls_token", "class_tokens", wrapped(1), part=(0, 1)),
        *[Row("reg_token", "class_tokens", wrapped(1), part=(1, count))] * (count > 1),
        Row("pos_embed", "positions/embedding", wrapped(1)),
        *linear("patch_embed.proj", "embedding/patches", not first, axes=patches(h, w)),
        *(norm("norm_pre", "encoder/input_norm") if first else ()),
        *each(given["depth"], [
            *norm(f"{theirs}.norm1", f"{ours}/attention_norm"),
            *attention(f"{theirs}.attn", f"{ours}/attention", names, biases),
            *[Row(f"{theirs}.ls1.gamma", f"{ours}/attention_scale")] * (scale is not None),
            *norm(f"{theirs}.norm2", f"{ours}/mlp_norm"),
            *linear(f"{theirs}.mlp.fc1", f"{ours}/mlp/up"),
            *linear(f"{theirs}.mlp.fc2", f"{ours}/mlp/down"),
            *[Row(f"{theirs}.ls2.gamma", f"{ours}/mlp_scale")] * (scale is not None),
        ]),
        *norm("norm", "encoder/norm"),
        *(linear("head", "head") if given["num_classes"] else ()),
    ]  # fmt: skip
    return Family(module, (blank(1, down * h, across * w, given["in_chans"]),), rows)
