"""BERT, RoBERTa and DistilBERT: post-norm encoders of text."""

from typing import Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha.interop.checked_config import Config
from flax_mha.interop.modules import classified
from flax_mha.interop.shared_settings import activation, refuse
from flax_mha.interop.table import TOKEN_EXAMPLE, Family, TensorRule, norm, stack
from flax_mha.linen import LayerOptions, MultiHeadAttention
from flax_mha.models import Encoder, PositionEmbedding, TokenEmbedding
from flax_mha.models.attention_mask import read_padding
from flax_mha.models.blocks import EncoderBlock
from flax_mha.models.feed_forward import ACTIVATIONS

# Buffers that hold 0, 1, 2, …
BUFFERS = ("*.position_ids", "*.token_type_ids")
# Parts on top of an encoder: poolers and output heads.
HEADS = (
    "pooler.*", "cls.*", "lm_head.*", "vocab_*", "classifier.*", "qa_outputs.*",
    "generator_*", "discriminator_*",
)  # fmt: skip


# The optional prefix of all names, by the model type.
_PREFIXES = {
    "bert": "bert.", "ernie": "ernie.", "electra": "electra.", "roberta": "roberta.",
    "xlm-roberta": "roberta.", "camembert": "roberta.", "data2vec-text": "data2vec_text.",
}  # fmt: skip
_EMBEDDING_ROWS = [
    TensorRule("embeddings.word_embeddings.weight", "embedding/table/embedding"),
    TensorRule("embeddings.position_embeddings.weight", "positions/embedding"),
    *norm("embeddings.LayerNorm", "encoder/input_norm"),
]


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
          attention_mask: bool or int [*B, T] of a tokenizer, 0 for padding anywhere. As in
            `transformers`, RoBERTa's positions count only tokens, and BERT's also padding.
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
    D, layers = config["hidden_size"], config["num_hidden_layers"]
    kind = config["model_type"]
    prefix, has_pooler = _PREFIXES[kind], kind in ("bert", "ernie")
    # RoBERTa's positions start after the padding token's id.
    first = 0 if has_pooler or kind == "electra" else config.get("pad_token_id", 1) + 1
    refuse(config, position_embedding_type="absolute", embedding_size=D)
    block = EncoderBlock(
        MultiHeadAttention(config["num_attention_heads"]), config["intermediate_size"],
        activation=activation(config, "hidden_act"), pre_norm=False,
        norm_epsilon=config["layer_norm_eps"],
    )  # fmt: skip
    module = Bert(
        TokenEmbedding(config["vocab_size"], D),
        TokenEmbedding(config["type_vocab_size"], D),
        PositionEmbedding(max_length=config["max_position_embeddings"]),
        Encoder(layers, block, input_norm=True),
        first=first,
    )
    heads = ("self.query", "self.key", "self.value", "output.dense")
    rows = [
        *_EMBEDDING_ROWS,
        TensorRule("embeddings.token_type_embeddings.weight", "types/table/embedding"),
        *stack(layers, "encoder.layer.{}", "encoder", {"attention": "attention"}, heads, {
            "attention.output.LayerNorm": "attention_norm", "intermediate.dense": "mlp/up",
            "output.dense": "mlp/down", "output.LayerNorm": "mlp_norm",
        }),
    ]  # fmt: skip
    family = Family(module, TOKEN_EXAMPLE, rows, BUFFERS, HEADS, prefix)
    act = ACTIVATIONS["gelu_exact"] if kind == "electra" else nn.tanh
    if has_pooler:
        return classified(config, family, f"{prefix}pooler.dense", activation=act)
    return classified(config, family, "classifier.dense", "classifier.out_proj", act)


def distilbert(config: Config) -> Family:
    """Return the family of `DistilBertModel` and `DistilBertForSequenceClassification`."""
    D, layers = config["dim"], config["n_layers"]
    block = EncoderBlock(
        MultiHeadAttention(config["n_heads"]), config["hidden_dim"],
        activation=activation(config, "activation"), pre_norm=False, norm_epsilon=1e-12,
    )  # fmt: skip
    module = Bert(
        TokenEmbedding(config["vocab_size"], D), None,
        PositionEmbedding(max_length=config["max_position_embeddings"]),
        Encoder(layers, block, input_norm=True),
    )  # fmt: skip
    heads = ("q_lin", "k_lin", "v_lin", "out_lin")
    rows = stack(layers, "transformer.layer.{}", "encoder", {"attention": "attention"}, heads, {
        "sa_layer_norm": "attention_norm", "ffn.lin1": "mlp/up", "ffn.lin2": "mlp/down",
        "output_layer_norm": "mlp_norm",
    })  # fmt: skip
    rows = _EMBEDDING_ROWS + rows
    family = Family(module, TOKEN_EXAMPLE, rows, BUFFERS, HEADS, "distilbert.")
    return classified(config, family, "pre_classifier", activation=nn.relu)
