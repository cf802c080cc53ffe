"""Whisper: text from sound."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np

from flax_mha.interop.config import activation, blank, refuse
from flax_mha.interop.settings import Config
from flax_mha.interop.table import Family, Layout, TensorRule, attention, linear, norm, per_layer
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import (
    Decoder,
    Encoder,
    LanguageModel,
    PositionEmbedding,
    TokenEmbedding,
    Translator,
)
from flax_mha.models.blocks import DecoderBlock, EncoderBlock

HEADS = ("q_proj", "k_proj", "v_proj", "out_proj")


class Whisper(Translator):
    """Logits of each next token, from a spectrogram and the tokens so far.

    Attributes:
      positions: of what the convolutions give, to the encoder.

    Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022.
    """

    positions: PositionEmbedding = PositionEmbedding()
    reads_tokens = False

    def setup(self) -> None:
        """Make the convolutions."""
        D = self.decoder.embedding.features
        self.convolutions = [
            nn.Conv(D, (3,), strides=stride, padding=1, name=f"conv{stride}") for stride in (1, 2)
        ]

    def encode(
        self, source: jax.Array, *, source_lengths: jax.Array | None = None, **options: Any
    ) -> jax.Array:
        """Map sound [*B, frames, bins] to the memory [*B, frames / 2, D]."""
        if source_lengths is not None:
            raise ValueError(
                "source_lengths must be None: Whisper reads 30 seconds whatever is in them; pad "
                "the sound with silence"
            )
        for convolution in self.convolutions:
            source = nn.gelu(convolution(source), approximate=False)
        return self.encoder(self.positions(source), **options)


def whisper(config: Config) -> Family:
    """Return the family of `WhisperForConditionalGeneration`."""
    refuse(config, tie_word_embeddings=True)
    D, V = config["d_model"], config["vocab_size"]
    biases = ("query", "value", "out")

    def options(side: str) -> dict[str, Any]:
        layer = MultiHeadAttention(config[f"{side}_attention_heads"], use_bias=biases)
        return {
            "attention": layer, "mlp_dim": config[f"{side}_ffn_dim"], "norm_epsilon": 1e-5,
            "activation": activation(config, "activation_function"),
        }  # fmt: skip

    cross = MultiHeadAttention(config["decoder_attention_heads"], use_bias=biases)
    module = Whisper(
        Encoder(config["encoder_layers"], EncoderBlock(**options("encoder"))),
        LanguageModel(
            TokenEmbedding(V, D),
            Decoder(
                config["decoder_layers"],
                DecoderBlock(cross_attention=cross, **options("decoder")),
            ),
            position_embedding=PositionEmbedding(max_length=config["max_target_positions"]),
        ),
        positions=PositionEmbedding(max_length=config["max_source_positions"]),
    )
    convolution = Layout(lambda x, shape: x.T.reshape(shape), lambda x: x.T)
    rows = [
        TensorRule("model.encoder.embed_positions.weight", "positions/embedding"),
        TensorRule("model.decoder.embed_positions.weight", "decoder/position_embedding/embedding"),
        TensorRule("model.decoder.embed_tokens.weight", "decoder/embedding/table/embedding"),
        *_stack("encoder", "encoder", config["encoder_layers"]),
        *_stack("decoder", "decoder/decoder", config["decoder_layers"]),
    ]
    for n in (1, 2):
        rows += linear(f"model.encoder.conv{n}", f"conv{n}", axes=convolution)
    sound = blank(1, 2 * config["max_source_positions"], config["num_mel_bins"])
    return Family(
        module, (sound, np.zeros((1, 1), np.int32)), rows,
        copies={"proj_out.weight": "model.decoder.embed_tokens.weight"},
    )  # fmt: skip


def _stack(theirs: str, ours: str, layers: int) -> list[TensorRule]:
    """Return the rows of a stack."""
    at, mine = f"model.{theirs}.layers.{{}}", f"{ours}/layers_{{}}"
    parts = {"self_attn": "attention"}
    if theirs == "decoder":
        parts["encoder_attn"] = "cross_attention"
    rows: list[TensorRule] = []
    for name, part in parts.items():
        rows += attention(f"{at}.{name}", f"{mine}/{part}", HEADS, (True, False, True, True))
        rows += norm(f"{at}.{name}_layer_norm", f"{mine}/{part}_norm")
    rows += linear(f"{at}.fc1", f"{mine}/mlp/up") + linear(f"{at}.fc2", f"{mine}/mlp/down")
    rows += norm(f"{at}.final_layer_norm", f"{mine}/mlp_norm")
    return [*per_layer(layers, rows), *norm(f"model.{theirs}.layer_norm", f"{ours}/norm")]
