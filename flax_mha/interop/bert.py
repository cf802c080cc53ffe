"""BERT, RoBERTa and DistilBERT: post-norm encoders of text."""

from collections.abc import Mapping
from typing import Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha.interop.checked_config import Config, filled
from flax_mha.interop.modules import classified
from flax_mha.interop.shared_settings import block, refuse
from flax_mha.interop.table import TOKEN_EXAMPLE, Family, parts, per_layer
from flax_mha.linen import LayerOptions
from flax_mha.models import Encoder, PositionEmbedding, TokenEmbedding
from flax_mha.models.attention_mask import read_padding
from flax_mha.models.feed_forward import ACTIVATIONS

# Buffers that hold 0, 1, 2, …
BUFFERS = ("*.position_ids", "*.token_type_ids")
# Poolers and output heads.
HEADS = (
    "pooler.*", "cls.*", "lm_head.*", "vocab_*", "classifier.*", "qa_outputs.*",
    "generator_*", "discriminator_*",
)  # fmt: skip


# The optional prefixes of names that differ from the `model_type`.
_PREFIXES = {
    "xlm-roberta": "roberta.", "camembert": "roberta.", "data2vec-text": "data2vec_text.",
}  # fmt: skip
_EMBEDDINGS = {
    "embeddings.word_embeddings": "embedding/table", "embeddings.position_embeddings": "positions",
    "embeddings.LayerNorm": "encoder/input_norm",
    "embeddings.token_type_embeddings": "types/table",
}  # fmt: skip
_PARTS = {
    "attention.self.query": "attention/query", "attention.self.key": "attention/key",
    "attention.self.value": "attention/value", "attention.output.dense": "attention/out",
    "attention.output.LayerNorm": "attention_norm", "intermediate.dense": "mlp/up",
    "output.dense": "mlp/down", "output.LayerNorm": "mlp_norm",
}  # fmt: skip
_DISTILBERT = {
    "attention.q_lin": "attention/query", "attention.k_lin": "attention/key",
    "attention.v_lin": "attention/value", "attention.out_lin": "attention/out",
    "sa_layer_norm": "attention_norm", "ffn.lin1": "mlp/up", "ffn.lin2": "mlp/down",
    "output_layer_norm": "mlp_norm",
}  # fmt: skip


class Bert(nn.Module):
    """An encoder of tokens int [*B, T] to features [*B, T, D].

    Attributes:
      embedding: the token embedding.
      types: the segment embedding, or None.
      positions: the learned position embedding.
      encoder: the stack; BERT's has a norm before the first block.
      first: the position of the first token (RoBERTa: 2).
    """

    embedding: TokenEmbedding
    types: TokenEmbedding | None
    positions: PositionEmbedding
    encoder: Encoder
    first: int = 0

    def __call__(
        self, tokens: jax.Array, types: jax.Array | None = None, *,
        attention_mask: jax.Array | None = None, **options: Unpack[LayerOptions],
    ) -> jax.Array:  # fmt: skip
        """Return the features of tokens.

        Args:
          tokens: int [*B, T].
          types: int [*B, T], the tokens' segments (default: 0).
          attention_mask: bool or int [*B, T] of a tokenizer, 0 for padding anywhere. RoBERTa's
            positions count only tokens, and BERT's also padding.
          **options: arguments of the blocks (see `MultiHeadAttention`).
        """
        tokens, read = read_padding(tokens, attention_mask, {**options, "positions": None})
        counted = read["positions"] if self.first else None
        positions = jnp.arange(tokens.shape[-1]) if counted is None else jnp.asarray(counted)
        x = self.embedding(tokens)
        if self.types is not None:
            types = jnp.zeros_like(tokens) if types is None else types
            x = x + self.types(read_padding(types, attention_mask, options)[0])
        options = {**read, "positions": options.get("positions")}
        return self.encoder(self.positions(x, self.first + positions), **options)


def bert(config: Config) -> Family:
    """Return the family of BERT and its variants, with the head for classes if it has one."""
    kind = config["model_type"]
    prefix, has_pooler = _PREFIXES.get(kind, f"{kind}."), kind in ("bert", "ernie")
    # RoBERTa's positions start after the padding token's id.
    first = 0 if has_pooler or kind == "electra" else config.get("pad_token_id", 1) + 1
    refuse(config, position_embedding_type="absolute", embedding_size=config["hidden_size"])
    types = TokenEmbedding(config["type_vocab_size"], config["hidden_size"])
    family = _family(config, _PARTS, "encoder.layer.{}", prefix, types, first)
    act = ACTIVATIONS["gelu_exact"] if kind == "electra" else nn.tanh
    if has_pooler:
        return classified(config, family, f"{prefix}pooler.dense", activation=act)
    return classified(config, family, "classifier.dense", "classifier.out_proj", act)


def distilbert(config: Config) -> Family:
    """Return the family of `DistilBertModel` and `DistilBertForSequenceClassification`."""
    names = {
        "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim", "hidden_act": "activation",
    }  # fmt: skip
    renamed = {new: config[old] for new, old in names.items()} | {"layer_norm_eps": 1e-12}
    family = _family(filled(config, **renamed), _DISTILBERT, "transformer.layer.{}", "distilbert.")
    return classified(config, family, "pre_classifier", activation=nn.relu)


def _family(
    config: Config, names: Mapping[str, str], layer: str, prefix: str,
    types: TokenEmbedding | None = None, first: int = 0,
) -> Family:  # fmt: skip
    """Return the family of an encoder, whose blocks have parts with these names."""
    D, layers = config["hidden_size"], config["num_hidden_layers"]
    module = Bert(
        TokenEmbedding(config["vocab_size"], D), types,
        PositionEmbedding(max_length=config["max_position_embeddings"]),
        Encoder(layers, block(config).clone(pre_norm=False), input_norm=True), first,
    )  # fmt: skip
    rows = per_layer(layers, parts(layer, "encoder/layers_{}", names))
    rows += parts("", "", _EMBEDDINGS)
    return Family(module, TOKEN_EXAMPLE, rows, BUFFERS, HEADS, prefix)
