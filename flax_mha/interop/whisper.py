"""Whisper: speech to text."""

from typing import Any

import flax.linen as nn
import jax

from flax_mha.base import numerics
from flax_mha.interop import table
from flax_mha.interop.checked_config import Config
from flax_mha.interop.shared_settings import activation, blank, refuse
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Decoder, Encoder, LanguageModel, TokenEmbedding, Translator
from flax_mha.models.blocks import DecoderBlock, EncoderBlock
from flax_mha.positions import PositionEmbedding

_PARTS = {
    "self_attn.q_proj": "attention/query", "self_attn.k_proj": "attention/key",
    "self_attn.v_proj": "attention/value", "self_attn.out_proj": "attention/out",
    "self_attn_layer_norm": "attention_norm",
    "encoder_attn.q_proj": "cross_attention/query", "encoder_attn.k_proj": "cross_attention/key",
    "encoder_attn.v_proj": "cross_attention/value", "encoder_attn.out_proj": "cross_attention/out",
    "encoder_attn_layer_norm": "cross_attention_norm",
    "fc1": "mlp/up", "fc2": "mlp/down", "final_layer_norm": "mlp_norm",
}  # fmt: skip


class _Convolution(nn.Conv):
    """A convolution, to be made without Flax's bias, whose bias has gradients summed in float32."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        y = super().__call__(inputs)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return numerics.plus(y, bias)


class Whisper(Translator):
    """A `Translator` from a spectrogram to text.

    Attributes:
      positions: the position embedding of the convolutions' output.

    Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022.
    """

    positions: PositionEmbedding = PositionEmbedding()
    reads_tokens = False

    def setup(self) -> None:
        """Make the convolutions."""
        D = self.decoder.embedding.features
        self.convolutions = [
            _Convolution(D, (3,), stride, padding=1, use_bias=False, name=f"conv{stride}")
            for stride in (1, 2)
        ]

    def encode(
        self, source: jax.Array, *, source_lengths: jax.Array | None = None, **options: Any
    ) -> jax.Array:
        """Return the encoder's output [*B, frames / 2, D] for spectrograms [*B, frames, bins]."""
        if source_lengths is not None:
            raise ValueError(
                "source_lengths must be None for Whisper, which always reads 30 seconds; pad the "
                "sound with silence"
            )
        for convolution in self.convolutions:
            source = nn.gelu(convolution(source), approximate=False)
        return self.encoder(self.positions(source), **options)


def whisper(config: Config) -> table.Family:
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

    decoder = options("decoder")
    module = Whisper(
        Encoder(config["encoder_layers"], EncoderBlock(**options("encoder"))),
        LanguageModel(
            TokenEmbedding(V, D),
            Decoder(
                config["decoder_layers"],
                DecoderBlock(cross_attention=decoder["attention"].copy(), **decoder),
            ),
            position_embedding=PositionEmbedding(max_length=config["max_target_positions"]),
        ),
        positions=PositionEmbedding(max_length=config["max_source_positions"]),
    )
    convolution = (lambda x, shape: x.T.reshape(shape), lambda x: x.T)
    rows = table.parts("model", "", {
        "encoder.embed_positions": "positions", "encoder.layer_norm": "encoder/norm",
        "decoder.embed_positions": "decoder/position_embedding",
        "decoder.embed_tokens": "decoder/embedding/table",
        "decoder.layer_norm": "decoder/decoder/norm",
    })  # fmt: skip
    for side, ours in (("encoder", "encoder"), ("decoder", "decoder/decoder")):
        layer = table.parts(f"model.{side}.layers.{{}}", f"{ours}/layers_{{}}", _PARTS)
        rows += table.per_layer(config[f"{side}_layers"], layer)
    for n in (1, 2):
        rows += table.linear(f"model.encoder.conv{n}", f"conv{n}", lambda _: convolution)
    sound = blank(1, 2 * config["max_source_positions"], config["num_mel_bins"])
    return table.Family(
        module, (sound, *table.TOKEN_EXAMPLE), rows,
        copies={"proj_out.weight": "model.decoder.embed_tokens.weight"},
    )  # fmt: skip
