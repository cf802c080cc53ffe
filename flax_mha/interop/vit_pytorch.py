"""The ViT of vit-pytorch, whose config is its arguments."""

from flax_mha.interop.config import blank, grid
from flax_mha.interop.settings import Config, filled, shown
from flax_mha.interop.table import Family, Row, attention, each, linear, norm
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Classifier
from flax_mha.models.blocks import EncoderBlock
from flax_mha.models.embeddings import PatchEmbedding
from flax_mha.models.stacks import Encoder


def vit_pytorch(config: Config) -> Family:
    """Of `vit_pytorch.ViT`, by its arguments under their names and with their defaults.

    With num_classes=0 the features of all tokens.
    """
    given = filled(config, pool="cls", channels=3, dim_head=64)
    D, heads, is_first = given["dim"], given["heads"], given["pool"] == "cls"
    if given["pool"] not in ("cls", "mean"):
        raise ValueError(f"the config's pool must be 'cls' or 'mean', got {shown(given['pool'])}")
    if heads == 1 and given["dim_head"] == D:
        raise ValueError(
            f"the config's heads=1 with dim_head={D} leaves out the projection of what heads give, "
            f"and ours always has it; give more heads, or another dim_head"
        )
    down, across, h, w = grid(given)
    block = EncoderBlock(
        MultiHeadAttention(heads, head_dim=given["dim_head"], use_bias=("out",)), given["mlp_dim"],
        activation="gelu_exact", norm_epsilon=1e-5,
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding((h, w), D, norm_epsilon=1e-5), Encoder(given["depth"], block),
        given["num_classes"] or None, class_tokens=int(is_first),
        pooling="first" if is_first else "mean",
    )  # fmt: skip
    names, biases = ("to_qkv", "to_qkv", "to_qkv", "to_out.0"), (False, False, False, True)
    patch, theirs, ours = "to_patch_embedding", "transformer.layers.{}", "encoder/layers_{}"
    rows = [
        *norm(f"{patch}.1", "embedding/patches_norm"),
        *linear(f"{patch}.2", "embedding/patches"),
        *norm(f"{patch}.3", "embedding/norm"),
        *[Row("cls_token", "class_tokens")] * is_first,
        Row("pos_embedding", "positions/embedding"),
        *each(given["depth"], [
            *norm(f"{theirs}.0.norm", f"{ours}/attention_norm"),
            *attention(f"{theirs}.0", f"{ours}/attention", names, biases),
            *norm(f"{theirs}.1.net.0", f"{ours}/mlp_norm"),
            *linear(f"{theirs}.1.net.1", f"{ours}/mlp/up"),
            *linear(f"{theirs}.1.net.4", f"{ours}/mlp/down"),
        ]),
        *norm("transformer.norm", "encoder/norm"),
        *(linear("mlp_head", "head") if given["num_classes"] else ()),
    ]  # fmt: skip
    # With pool="mean" theirs is empty.
    ignored = () if is_first else ("cls_token",)
    image = blank(1, down * h, across * w, given["channels"])
    return Family(module, (image,), rows, ignored)
