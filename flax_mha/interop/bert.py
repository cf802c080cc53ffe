"""BERT, RoBERTa and DistilBERT: encoders of text, post-norm."""

from typing import Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.attention import LayerOptions, MultiHeadAttention
from flax_mha.blocks import EncoderBlock
from flax_mha.embeddings import TokenEmbedding
from flax_mha.interop.classes import classified
from flax_mha.interop.config import activation, refuse
from flax_mha.interop.settings import Config
from flax_mha.interop.table import Family, Row, attention, each, linear, norm
from flax_mha.positions import PositionEmbedding
from flax_mha.stacks import Encoder

_EXAMPLE = (np.zeros((1, 1), np.int32),)
# Tensors that an encoder does not read: the pooler's, and a buffer that counts from 0.
POOLER = ("pooler.*", "*.position_ids")
# Heads on top of it: for words, sentences, classes, answers.
HEADS = ("cls.*", "lm_head.*", "vocab_*", "classifier.*", "qa_outputs.*")


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
        """The features, with options for the encoder."""
        x = self.embedding(tokens)
        if self.types is not None:
            x = x + self.types(jnp.zeros_like(tokens) if types is None else types)
        return self.encoder(self.positions(x, self.first + jnp.arange(x.shape[-2])), **options)


def bert(config: Config) -> Family:
    """Of `BertModel` and `RobertaModel`, and of both `…ForSequenceClassification`."""
    refuse(config, position_embedding_type="absolute", is_decoder=False)
    D, layers = config["hidden_size"], config["num_hidden_layers"]
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
        first=config["pad_token_id"] + 1 if config["model_type"] == "roberta" else 0,
    )
    theirs, ours = "encoder.layer.{}", "encoder/layers_{}"
    heads = ("self.query", "self.key", "self.value", "output.dense")
    rows = [
        Row("embeddings.word_embeddings.weight", "embedding/table/embedding"),
        Row("embeddings.token_type_embeddings.weight", "types/table/embedding"),
        Row("embeddings.position_embeddings.weight", "positions/embedding"),
        *norm("embeddings.LayerNorm", "encoder/input_norm"),
        *each(layers, [
            *attention(f"{theirs}.attention", f"{ours}/attention", heads),
            *norm(f"{theirs}.attention.output.LayerNorm", f"{ours}/attention_norm"),
            *linear(f"{theirs}.intermediate.dense", f"{ours}/mlp/up"),
            *linear(f"{theirs}.output.dense", f"{ours}/mlp/down"),
            *norm(f"{theirs}.output.LayerNorm", f"{ours}/mlp_norm"),
        ]),
    ]  # fmt: skip
    kind = config["model_type"]
    family = Family(module, _EXAMPLE, rows, POOLER, HEADS, f"{kind}.")
    if kind == "roberta":
        return classified(config, family, "classifier.dense", "classifier.out_proj")
    return classified(config, family, "bert.pooler.dense")


def distilbert(config: Config) -> Family:
    """Of `DistilBertModel` and `DistilBertForSequenceClassification`."""
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
        Row("embeddings.word_embeddings.weight", "embedding/table/embedding"),
        Row("embeddings.position_embeddings.weight", "positions/embedding"),
        *norm("embeddings.LayerNorm", "encoder/input_norm"),
        *each(layers, [
            *attention(f"{theirs}.attention", f"{ours}/attention", heads),
            *norm(f"{theirs}.sa_layer_norm", f"{ours}/attention_norm"),
            *linear(f"{theirs}.ffn.lin1", f"{ours}/mlp/up"),
            *linear(f"{theirs}.ffn.lin2", f"{ours}/mlp/down"),
            *norm(f"{theirs}.output_layer_norm", f"{ours}/mlp_norm"),
        ]),
    ]  # fmt: skip
    family = Family(module, _EXAMPLE, rows, POOLER, HEADS, "distilbert.")
    return classified(config, family, "pre_classifier", by=nn.relu)
