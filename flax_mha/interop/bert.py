"""BERT, RoBERTa and DistilBERT: encoders of text, post-norm."""

from typing import NamedTuple, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.interop.config import activation, refuse
from flax_mha.interop.modules import classified
from flax_mha.interop.settings import Config
from flax_mha.interop.table import Family, TensorRule, attention, linear, norm, per_layer
from flax_mha.linen import LayerOptions, MultiHeadAttention
from flax_mha.models import Encoder, PositionEmbedding, TokenEmbedding
from flax_mha.models.blocks import EncoderBlock
from flax_mha.models.feed_forward import ACTIVATIONS, Activation

_EXAMPLE = (np.zeros((1, 1), np.int32),)
# Buffers that count from 0.
BUFFERS = ("*.position_ids", "*.token_type_ids")
# On top of an encoder: a pooler, and heads for words, sentences, classes, answers.
HEADS = (
    "pooler.*", "cls.*", "lm_head.*", "vocab_*", "classifier.*", "qa_outputs.*",
    "generator_*", "discriminator_*",
)  # fmt: skip


class BertTraits(NamedTuple):
    """The record of a model type.

    Attributes:
      prefix: what models that wrap it put before all names.
      is_padded: whether positions begin after that of the padding's id.
      dense: tensors of the layer before the classes.
      head: and of that of the classes.
      by: the activation between them.
    """

    prefix: str
    is_padded: bool = False
    dense: str = "classifier.dense"
    head: str = "classifier.out_proj"
    by: Activation = nn.tanh


KINDS = {
    "bert": BertTraits("bert.", dense="bert.pooler.dense", head="classifier"),
    "ernie": BertTraits("ernie.", dense="ernie.pooler.dense", head="classifier"),
    "electra": BertTraits("electra.", by=ACTIVATIONS["gelu_exact"]),
    "roberta": BertTraits("roberta.", is_padded=True),
    "xlm-roberta": BertTraits("roberta.", is_padded=True),
    "camembert": BertTraits("roberta.", is_padded=True),
    "data2vec-text": BertTraits("data2vec_text.", is_padded=True),
}


class Bert(nn.Module):
    """Tokens int [*B, T] to features [*B, T, D].

    Attributes:
      embedding: of tokens.
      types: of segments, 0 unless said; or None.
      positions: learned.
      encoder: the stack; BERT's has a norm before it.
      first: where the first token stands (RoBERTa: 2).
    """

    embedding: TokenEmbedding
    types: TokenEmbedding | None
    positions: PositionEmbedding
    encoder: Encoder
    first: int = 0

    def __call__(
        self, tokens: jax.Array, types: jax.Array | None = None, **options: Unpack[LayerOptions]
    ) -> jax.Array:
        """Return the features, with options for the encoder."""
        x = self.embedding(tokens)
        if self.types is not None:
            x = x + self.types(jnp.zeros_like(tokens) if types is None else types)
        return self.encoder(self.positions(x, self.first + jnp.arange(x.shape[-2])), **options)


def bert(config: Config) -> Family:
    """Return the family of a model type in `KINDS`, with its head for classes if it has one."""
    D, layers = config["hidden_size"], config["num_hidden_layers"]
    record = KINDS[config["model_type"]]
    refuse(config, position_embedding_type="absolute", embedding_size=D)
    layer = MultiHeadAttention(config["num_attention_heads"])
    block = EncoderBlock(
        layer, config["intermediate_size"], activation=activation(config, "hidden_act"),
        pre_norm=False, norm_epsilon=config["layer_norm_eps"],
    )  # fmt: skip
    module = Bert(
        TokenEmbedding(config["vocab_size"], D),
        TokenEmbedding(config["type_vocab_size"], D),
        PositionEmbedding(max_length=config["max_position_embeddings"]),
        Encoder(layers, block, input_norm=True),
        first=config.get("pad_token_id", 1) + 1 if record.is_padded else 0,
    )
    theirs, ours = "encoder.layer.{}", "encoder/layers_{}"
    heads = ("self.query", "self.key", "self.value", "output.dense")
    rows = [
        TensorRule("embeddings.word_embeddings.weight", "embedding/table/embedding"),
        TensorRule("embeddings.token_type_embeddings.weight", "types/table/embedding"),
        TensorRule("embeddings.position_embeddings.weight", "positions/embedding"),
        *norm("embeddings.LayerNorm", "encoder/input_norm"),
        *per_layer(layers, [
            *attention(f"{theirs}.attention", f"{ours}/attention", heads),
            *norm(f"{theirs}.attention.output.LayerNorm", f"{ours}/attention_norm"),
            *linear(f"{theirs}.intermediate.dense", f"{ours}/mlp/up"),
            *linear(f"{theirs}.output.dense", f"{ours}/mlp/down"),
            *norm(f"{theirs}.output.LayerNorm", f"{ours}/mlp_norm"),
        ]),
    ]  # fmt: skip
    family = Family(module, _EXAMPLE, rows, BUFFERS, HEADS, record.prefix)
    return classified(config, family, record.dense, record.head, record.by)


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
    theirs, ours = "transformer.layer.{}", "encoder/layers_{}"
    heads = ("q_lin", "k_lin", "v_lin", "out_lin")
    rows = [
        TensorRule("embeddings.word_embeddings.weight", "embedding/table/embedding"),
        TensorRule("embeddings.position_embeddings.weight", "positions/embedding"),
        *norm("embeddings.LayerNorm", "encoder/input_norm"),
        *per_layer(layers, [
            *attention(f"{theirs}.attention", f"{ours}/attention", heads),
            *norm(f"{theirs}.sa_layer_norm", f"{ours}/attention_norm"),
            *linear(f"{theirs}.ffn.lin1", f"{ours}/mlp/up"),
            *linear(f"{theirs}.ffn.lin2", f"{ours}/mlp/down"),
            *norm(f"{theirs}.output_layer_norm", f"{ours}/mlp_norm"),
        ]),
    ]  # fmt: skip
    family = Family(module, _EXAMPLE, rows, BUFFERS, HEADS, "distilbert.")
    return classified(config, family, "pre_classifier", by=nn.relu)
