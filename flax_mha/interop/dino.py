"""DINOv3: an encoder of images whose patches are turned by row and column."""

import math

from flax_mha.interop.config import activation, blank, grid
from flax_mha.interop.settings import Config
from flax_mha.interop.table import Family, Row, attention, each, linear, norm, patches, wrapped
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Classifier
from flax_mha.models.blocks import EncoderBlock
from flax_mha.models.embeddings import PatchEmbedding
from flax_mha.models.stacks import Encoder
from flax_mha.positions import Axial

_HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")


def dinov3(config: Config) -> Family:
    """Of `DINOv3ViTModel`, for images of the size that the config names."""
    D, layers = config["hidden_size"], config["num_hidden_layers"]
    down, across, h, w = grid(config)
    count = 1 + config["num_register_tokens"]
    base = (config.get("rope_parameters") or config)["rope_theta"]
    gated, mlp_bias = config.get("use_gated_mlp", False), config.get("mlp_bias", True)
    own = ("query", "key", "value", "proj")
    biases = tuple(config.get(f"{name}_bias", name != "key") for name in own)
    named = ("query", "key", "value", "out")
    layer = MultiHeadAttention(
        config["num_attention_heads"],
        use_bias=tuple(name for name, biased in zip(named, biases, strict=True) if biased),
        rotary=Axial((down, across), base, span=2 * math.pi, prefix=count),
    )
    block = EncoderBlock(
        layer, config["intermediate_size"], activation=activation(config, "hidden_act"),
        gated=gated, mlp_bias=mlp_bias, norm_epsilon=config["layer_norm_eps"],
        layer_scale=config.get("layerscale_value", 1.0),
    )  # fmt: skip
    module = Classifier(
        PatchEmbedding((h, w), D),
        Encoder(layers, block),
        None,
        positions="none",
        class_tokens=count,
    )
    at, mine = "model.layer.{}", "encoder/layers_{}"
    rows = [
        Row("embeddings.cls_token", "class_tokens", wrapped(1), part=(0, 1)),
        Row("embeddings.register_tokens", "class_tokens", wrapped(1), part=(1, count)),
        *linear("embeddings.patch_embeddings", "embedding/patches", axes=patches(h, w)),
        *each(layers, [
            *attention(f"{at}.attention", f"{mine}/attention", _HEADS, biases),
            *norm(f"{at}.norm1", f"{mine}/attention_norm"),
            *norm(f"{at}.norm2", f"{mine}/mlp_norm"),
            *(linear(f"{at}.mlp.gate_proj", f"{mine}/mlp/gate", mlp_bias) if gated else ()),
            *linear(f"{at}.mlp.up_proj", f"{mine}/mlp/up", mlp_bias),
            *linear(f"{at}.mlp.down_proj", f"{mine}/mlp/down", mlp_bias),
            Row(f"{at}.layer_scale1.lambda1", f"{mine}/attention_scale"),
            Row(f"{at}.layer_scale2.lambda1", f"{mine}/mlp_scale"),
        ]),
        *norm("norm", "encoder/norm"),
    ]  # fmt: skip
    image = blank(1, down * h, across * w, config.get("num_channels", 3))
    # Names of the first checkpoints have no "model." before the layers.
    mask = ("embeddings.mask_token",)
    return Family(module, (image,), rows, heads=mask, prefix="model.")
