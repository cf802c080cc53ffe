"""BERT, RoBERTa and DistilBERT: post-norm encoders of text."""

from typing import NamedTuple, Unpack

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
from flax_mha.models.feed_forward import ACTIVATIONS, Activation

# Buffers that hold 0, 1, 2, …
BUFFERS = ("*.position_ids", "*.token_type_ids")
# Parts on top of an encoder: a pooler, and output heads for words, sentences, classes and answers.
HEADS = (
    "pooler.*", "cls.*", "lm_head.*", "vocab_*", "classifier.*", "qa_outputs.*",
    "generator_*", "discriminator_*",
)  # fmt: skip


class BertTraits(NamedTuple):
    """The properties of a model type.

    Attributes:
      prefix: an optional prefix of all names, which models that wrap this one add.
      is_padded: True if positions start after the padding token's id.
      dense: the name of the dense layer before the classes.
      head: the name of the output layer of the classes.
      activation: the activation between these two layers.
    """

    prefix: str
    is_padded: bool = False
    dense: str = "classifier.dense"
    head: str = "classifier.out_proj"
    activation: Activation = nn.tanh


KINDS = {
    "bert": BertTraits("bert.", dense="bert.pooler.dense", head="classifier"),
    "ernie": BertTraits("ernie.", dense="ernie.pooler.dense", head="classifier"),
    "electra": BertTraits("electra.", activation=ACTIVATIONS["gelu_exact"]),
    "roberta": BertTraits("roberta.", is_padded=True),
    "xlm-roberta": BertTraits("roberta.", is_padded=True),
    "camembert": BertTraits("roberta.", is_padded=True),
    "data2vec-text": BertTraits("data2vec_text.", is_padded=True),
}
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
          attention_mask: bool or int [*B, T] as tokenizers give it, 0 for padding, on either side
            or between tokens. As in `transformers`, RoBERTa's positions count tokens, and BERT's
            count padding too.
          **options: arguments of the blocks (see `MultiHeadAttention`).
        """
        tokens, read = read_padding(tokens, attention_mask, {**options, "positions": None})
        counted = read["positions"] if self.first else None
        at = jnp.arange(tokens.shape[-1]) if counted is None else jnp.asarray(counted)
        x = self.embedding(tokens)
        if self.types is not None:
            types = jnp.zeros_like(tokens) if types is None else types
            x = x + self.types(read_padding(types, attention_mask, options)[0])
        options = {**read, "positions": options.get("positions")}
        return self.encoder(self.positions(x, self.first + at), **options)


def bert(config: Config) -> Family:
    """Return the family of BERT and its variants, with the head for classes if it has one."""
    D, layers = config["hidden_size"], config["num_hidden_layers"]
    traits = KINDS[config["model_type"]]
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
        first=config.get("pad_token_id", 1) + 1 if traits.is_padded else 0,
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
    family = Family(module, TOKEN_EXAMPLE, rows, BUFFERS, HEADS, traits.prefix)
    return classified(config, family, traits.dense, traits.head, traits.activation)


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
