"""ModernBERT: a pre-norm encoder of text whose layers are local or global."""

from flax_mha import masks
from flax_mha.interop import table
from flax_mha.interop.bert import HEADS, Bert
from flax_mha.interop.checked_config import Config, filled
from flax_mha.interop.modules import classified
from flax_mha.interop.shared_settings import (
    FULL,
    SLIDING,
    activation,
    by_layer,
    choice,
    refuse,
    rotary,
)
from flax_mha.layer.qk_norm import layer_norm
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Encoder, PositionEmbedding, TokenEmbedding
from flax_mha.models.blocks import EncoderBlock
from flax_mha.models.feed_forward import ACTIVATIONS

_PARTS = {
    "attn.Wqkv": ("attention/query", "attention/key", "attention/value"),
    "attn.Wo": "attention/out", "attn_norm": "attention_norm", "mlp_norm": "mlp_norm",
    "mlp.Wi": ("mlp/gate", "mlp/up"), "mlp.Wo": "mlp/down",
}  # fmt: skip
# The old keys of the rotary bases, and their defaults.
_BASES = {FULL: ("global_rope_theta", 1.6e5), SLIDING: ("local_rope_theta", 1e4)}


def modernbert(config: Config) -> table.Family:
    """Return the family of `ModernBertModel` and `ModernBertForSequenceClassification`."""
    count = config["num_hidden_layers"]
    # Its layers read only their own bases.
    refuse(config, rope_theta=None)
    rotations = {name: rotary(config, name, config.get(*base)) for name, base in _BASES.items()}
    every = config.get("global_attn_every_n_layers", 3)
    default = [SLIDING if i % every else FULL for i in range(count)]
    types = by_layer(config, "layer_types", default)
    left = config.get("local_attention", 128) // 2
    biased, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    norm_bias = config.get("norm_bias", False)
    norm = layer_norm(config.get("norm_eps", 1e-5), use_bias=norm_bias)

    def block(i: int) -> EncoderBlock:
        layer = MultiHeadAttention(
            config["num_attention_heads"], use_bias=biased, rotary=rotations[types[i]],
            mask=masks.Window(left, left) if types[i] == SLIDING else None,
        )  # fmt: skip
        return EncoderBlock(
            layer, config["intermediate_size"], gated=True, mlp_bias=mlp_bias, norm=norm,
            # The embeddings are normed.
            pre_norm=("mlp",) if i == 0 else True,
            activation=activation(config, "hidden_activation"),
        )  # fmt: skip

    module = Bert(
        TokenEmbedding(config["vocab_size"], config["hidden_size"]), None,
        PositionEmbedding("none"),
        Encoder(count, tuple(map(block, range(count))), input_norm=True),
    )  # fmt: skip
    rows = table.per_layer(count, table.parts("layers.{}", "encoder/layers_{}", _PARTS))
    rows += table.parts("", "", {
        "embeddings.tok_embeddings": "embedding/table", "embeddings.norm": "encoder/input_norm",
        "final_norm": "encoder/norm",
    })  # fmt: skip
    heads = (*HEADS, "head.*", "decoder.*")
    family = table.Family(module, table.TOKEN_EXAMPLE, rows, heads=heads, prefix="model.")
    pooling = choice(config, "classifier_pooling", {"cls": "first", "mean": "mean"}, "cls")
    act = activation(filled(config, classifier_activation="gelu"), "classifier_activation")
    family = classified(
        config, family, "head.dense", activation=ACTIVATIONS[act], norm=norm.copy(),
        use_bias=config.get("classifier_bias", False), pooling=pooling,
    )  # fmt: skip
    return family._replace(rows=family.rows + table.norm("head.norm", "norm"))
