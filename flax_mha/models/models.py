"""Models built from stacks: classifiers, language models, translators."""

from typing import Any, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.base import checks, numerics, shapes
from flax_mha.layer import padding
from flax_mha.layer.linear import Projection
from flax_mha.layer.settings import check_module
from flax_mha.linen import LayerOptions
from flax_mha.models.attention_mask import move_to_front, read_padding
from flax_mha.models.embeddings import TokenEmbedding
from flax_mha.models.feed_forward import Dropout
from flax_mha.models.stacks import Decoder, Encoder
from flax_mha.positions import PositionEmbedding
from flax_mha.sharding import rules


class Classifier(nn.Module):
    """A classifier of sequences: embedding, encoder, pooling over tokens, and output layer.

    Attributes:
      embedding: `TokenEmbedding`, `PatchEmbedding` or any module that returns [*B, T, D].
      encoder: the stack.
      num_classes: the number of classes; None to return the tokens' features.
      positions: the kind of `PositionEmbedding`; "none" if the attention layers rotate.
      dropout_rate: the dropout rate of the embedded tokens.
      class_tokens: the number of learned tokens before the input's tokens.
      pooling: "mean" over all tokens, "first" (ViT), or "first_and_mean" for the first one joined
        with the mean over the input's tokens (DINOv2).
      register_tokens: the number of learned tokens after the class tokens, without positions.

    Source: Darcet et al., "Vision Transformers Need Registers", 2023 (register_tokens).
    """

    embedding: nn.Module
    encoder: Encoder
    num_classes: int | None
    positions: str = "learned"
    dropout_rate: float = 0.0
    class_tokens: int = 0
    pooling: str = "mean"
    register_tokens: int = 0

    @nn.compact
    def __call__(self, inputs: jax.Array, **options: Unpack[LayerOptions]) -> jax.Array:
        """Classify each example of the batch.

        Args:
          inputs: the embedding's input.
          **options: arguments of the encoder. With dropout you must give `deterministic`.

        Returns:
          Logits [*B, num_classes], float32; or features [*B, T, D].
        """
        checks.fields(self)
        lengths = options.get("lengths")
        if isinstance(self.embedding, TokenEmbedding):
            inputs, _ = read_padding(inputs, None, options)
        x = self.embedding(inputs)
        if self.class_tokens:
            x, options = self._with_tokens("class_tokens", 0, x, options)
        x = PositionEmbedding(self.positions, name="positions")(x)
        if self.register_tokens:
            x, options = self._with_tokens("register_tokens", self.class_tokens, x, options)
        x = Dropout(self.dropout_rate)(x, deterministic=options.get("deterministic"))
        x = self.encoder(x, **options)
        if self.num_classes is None:
            return x
        x = x.astype(jnp.float32)
        first, learned = x[..., 0, :], self.class_tokens + self.register_tokens
        pooled = checks.choice("pooling", self.pooling, {
            "first": lambda: first,
            "mean": lambda: mean(x, options.get("lengths")),
            "first_and_mean": lambda: jnp.concatenate(
                [first, mean(x[..., learned:, :], lengths)], -1
            ),
        })  # fmt: skip
        head = Projection(
            (self.num_classes,), ("embed", None), rows=("batch",), dtype=jnp.float32, name="head"
        )
        return head(pooled())

    @nn.nowrap
    def _with_tokens(self, name: str, at: int, x: jax.Array, options: Any) -> tuple[jax.Array, Any]:
        """Insert learned tokens after the first `at`, and return the options for all tokens."""
        count, lengths = getattr(self, name), options.get("lengths")
        tokens = self.param(name, nn.initializers.normal(0.02), (count, x.shape[-1]))
        if lengths is not None:
            options = options | {"lengths": checks.integers("lengths", lengths) + count}

        def join(tokens: jax.Array, x: jax.Array) -> jax.Array:
            tokens = numerics.spread(tokens, (*x.shape[:-2], *tokens.shape), x.dtype)
            return jnp.concatenate([x[..., :at, :], tokens, x[..., at:, :]], axis=-2)

        return sharding.auto(join, ("batch", "norm_length", None), tokens, x), options


def mean(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Return the mean [*B, D] of the real tokens in [*B, T, D], or 0 if an example has none."""
    if lengths is None:
        return jnp.mean(x, axis=-2)
    count = jnp.maximum(jnp.asarray(lengths), 1)[..., None]
    return jnp.sum(padding.cleared(x, lengths), axis=-2) / count.astype(x.dtype)


class LanguageModel(nn.Module):
    """A language model, which predicts each next token from the tokens before it.

        logits[t] = decoder(E[tokens[0 … t]] + P)[t] · Eᵀ

    Attributes:
      embedding: the table E.
      decoder: the stack.
      tied: True to compute logits with E; False for a separate table, `head`.
      position_embedding: P, for layers that do not rotate (default: none).
      dropout_rate: the dropout rate of the embedded tokens.
      logits_scale: the factor of the logits, such as 1/√D in T5.
      logits_cap: c of the soft cap c·tanh(logits / c) after the scale (Gemma 2).
    """

    embedding: TokenEmbedding
    decoder: Decoder
    tied: bool = True
    position_embedding: PositionEmbedding = PositionEmbedding("none")
    dropout_rate: float = 0.0
    logits_scale: float = 1.0
    logits_cap: float | None = None

    def setup(self) -> None:
        """Create dropout and head."""
        check_module("decoder", self.decoder, Decoder)
        checks.fields(self)
        self.dropout = Dropout(self.dropout_rate)
        if not self.tied:
            self.head = self.embedding.copy(name=None)

    def __call__(
        self, tokens: jax.Array, memory: jax.Array | None = None, *, at: jax.Array | None = None,
        attention_mask: jax.Array | None = None, memory_lengths: jax.Array | None = None,
        **options: Unpack[LayerOptions],
    ) -> jax.Array:  # fmt: skip
        """Return the logits of the token after each token.

        Args:
          tokens: int [*B, T].
          attention_mask: bool or int [*B, T] as tokenizers give it, 0 for padding anywhere.
            Positions count tokens. For padding at the end, `lengths` is faster under jit.
          memory: [*B, S, D'], the encoder's output for `cross_attention`.
          at: int [*B], the only token of each example to return logits for (default: all).
          memory_lengths: int [*B], the number of real tokens in the memory (default: all).
          **options: arguments of the blocks. `position_embedding` gets `positions` or `order`, and
            needs one of them in decoding. With dropout you must give `deterministic`.

        Returns:
          Logits [*B, T, vocab_size], or with `at` [*B, 1, vocab_size]; float32 or wider.
        """
        tokens = checks.integers("tokens", tokens)
        decodes = self.decoder.decodes
        if decodes and attention_mask is not None:
            raise ValueError(
                "attention_mask must be None in decoding; give lengths, or call flax_mha.generate, "
                "which takes it"
            )
        tokens, options = read_padding(tokens, attention_mask, options)
        places: Any = options.get("positions")
        if places is None and options.get("order") is not None:
            places = shapes.check_order(options["order"], tokens.shape[-1])
        with rules.undivided_tokens(decodes):
            # The position after the cached tokens depends on their number.
            adds_positions = self.position_embedding.kind != "none"
            if places is None and adds_positions and self.has_variable("cache", "decoder"):
                raise ValueError(
                    "positions must be given for position_embedding in decoding, got None; give "
                    "positions=, or use layers that rotate"
                )
            x = self.embed(self.embedding(tokens), places, options.get("deterministic"))
            if all(block.attention.rotary is None for block in self.decoder.blocks):
                options.pop("positions", None)
            x = self.decoder(x, memory, memory_lengths=memory_lengths, **options)
            if at is not None:
                at = shapes.per_row("at", at, x.shape[:-2], x.shape[-2] - 1)
                # Select before the matmul, as the logits of a full prompt are large.
                x = sharding.auto(_select, ("batch", "norm_length", None), x, at)
            return self.to_logits(x)

    def to_logits(self, x: jax.Array) -> jax.Array:
        """Return the logits [*B, T, V] of the decoder's output [*B, T, D]."""
        logits = (self.embedding if self.tied else self.head).logits(x) * self.logits_scale
        cap = self.logits_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def embed(
        self, x: jax.Array, positions: jax.Array | None, deterministic: bool | None
    ) -> jax.Array:
        """Return embedded tokens x [*B, T, D] with their positions, after dropout."""
        return self.dropout(self.position_embedding(x, positions), deterministic=deterministic)


def _select(x: jax.Array, at: jax.Array) -> jax.Array:
    """Return the features [*B, 1, D] of token `at` of each example, NaN if out of range."""
    at = jnp.where(at < 0, x.shape[-2], at)[..., None, None]
    return jnp.take_along_axis(x, at, axis=-2, mode="fill", fill_value=jnp.nan)


class Translator(nn.Module):
    """An encoder-decoder model: an encoder, and a language model that attends to its output.

        logits = decoder(target, encoder(E[source] + P))

    Attributes:
      encoder: the stack over the source, whose tokens the decoder's table embeds.
      decoder: the model of the target, whose blocks have `cross_attention`.

    Source: Vaswani et al., "Attention Is All You Need", 2017.
    """

    encoder: Encoder
    decoder: LanguageModel
    # False in subclasses with another source than tokens.
    reads_tokens = True

    def __call__(
        self, source: jax.Array, target: jax.Array, *, source_lengths: jax.Array | None = None,
        attention_mask: jax.Array | None = None, deterministic: bool | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Return the logits of the token after each target token.

        Args:
          source: int [*B, S].
          target: int [*B, T].
          attention_mask: bool or int [*B, S] in place of `source_lengths`, as tokenizers give it, 0
            for padding, which the encoder reads after the tokens (not between tokens if the encoder
            has `scores`).
          source_lengths: int [*B], the number of real tokens in each source (default: all).
          deterministic: False to apply dropout; you must give it if the model has dropout.
          sow_weights: True to sow the attention weights.

        Returns:
          Logits [*B, T, vocab_size], float32 or wider.
        """
        if attention_mask is not None and source_lengths is not None:
            raise ValueError("attention_mask must be None with source_lengths, got both; give one")
        if attention_mask is not None:
            source, source_lengths = move_to_front(
                jnp.asarray(source), attention_mask, not self.encoder.scores
            )
        call: Any = {"deterministic": deterministic, "sow_weights": sow_weights}
        memory = self.encode(source, source_lengths=source_lengths, **call)
        return self.decode(target, memory, memory_lengths=source_lengths, **call)

    def encode(
        self, source: jax.Array, *, source_lengths: jax.Array | None = None,
        deterministic: bool | None = None, sow_weights: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Return the encoder's output [*B, S, D], with the arguments of `__call__`."""
        source, options = read_padding(source, None, {"lengths": source_lengths})
        x = self.decoder.embed(self.decoder.embedding(source), None, deterministic)
        return self.encoder(x, deterministic=deterministic, sow_weights=sow_weights, **options)

    def decode(self, target: jax.Array, memory: jax.Array | None = None, **call: Any) -> jax.Array:
        """Return the decoder's logits, with the arguments of `LanguageModel.__call__`."""
        return self.decoder(target, memory, **call)
