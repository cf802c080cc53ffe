"""T5 and mT5: an encoder and a decoder of text with relative position biases."""

from typing import Any

from flax_mha.interop.checked_config import Config
from flax_mha.interop.shared_settings import activation
from flax_mha.interop.table import (
    TOKEN_EXAMPLE,
    Family,
    TensorRule,
    norm,
    parts,
    per_layer,
    transposed,
)
from flax_mha.linen import MultiHeadAttention
from flax_mha.models import Decoder, Encoder, LanguageModel, TokenEmbedding, Translator
from flax_mha.models.blocks import DecoderBlock, EncoderBlock
from flax_mha.scores import RelativeBias

_ATTENTION = {
    "0.layer_norm": "attention_norm", "0.SelfAttention.q": "attention/query",
    "0.SelfAttention.k": "attention/key", "0.SelfAttention.v": "attention/value",
    "0.SelfAttention.o": "attention/out",
}  # fmt: skip
_CROSS = {
    "1.layer_norm": "cross_attention_norm", "1.EncDecAttention.q": "cross_attention/query",
    "1.EncDecAttention.k": "cross_attention/key", "1.EncDecAttention.v": "cross_attention/value",
    "1.EncDecAttention.o": "cross_attention/out",
}  # fmt: skip


def t5(config: Config) -> Family:
    """Return the family of `T5ForConditionalGeneration`, of version 1.0 or 1.1, or of mT5."""
    is_mt5 = config["model_type"] == "mt5"
    D, tied = config["d_model"], config.get("tie_word_embeddings", True)
    # "relu" or "gated-gelu". The first configs lack this key.
    form = config.get("feed_forward_proj", "gated-gelu" if is_mt5 else "relu")
    gated = form.startswith("gated-")
    act = "gelu_new" if form == "gated-gelu" else form.removeprefix("gated-")
    layer = MultiHeadAttention(
        config["num_heads"], head_dim=config["d_kv"], use_bias=False, scale=1.0
    )
    options: dict[str, Any] = {
        "norm": "rmsnorm", "norm_epsilon": config["layer_norm_epsilon"],
        "gated": gated, "activation": activation({"feed_forward_proj": act}, "feed_forward_proj"),
    }  # fmt: skip

    max_distance = config.get("relative_attention_max_distance", 128)
    bias = RelativeBias(None, True, max_distance, config["relative_attention_num_buckets"])
    # Only T5 scales the logits of a tied head.
    scaled = not is_mt5 and config.get("scale_decoder_outputs", tied)
    encoder = EncoderBlock(layer, config["d_ff"], **options)
    decoder = DecoderBlock(layer, config["d_ff"], cross_attention=layer.copy(), **options)
    count = config.get("num_decoder_layers") or config["num_layers"]
    model = Translator(
        Encoder(config["num_layers"], encoder, scores=(bias,)),
        LanguageModel(
            TokenEmbedding(config["vocab_size"], D),
            Decoder(count, decoder, scores=(bias.replace(bidirectional=False),)),
            tied=tied,
            logits_scale=D**-0.5 if scaled else 1.0,
        ),
    )
    rows = [
        *parts("", "decoder", {"shared": "embedding/table", "lm_head": "head/table"}),
        *_stack("encoder", "encoder", config["num_layers"], _ATTENTION, 1, gated),
        *_stack("decoder", "decoder/decoder", count, _ATTENTION | _CROSS, 2, gated),
    ]
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    # The first checkpoints have a table that the model never reads.
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return Family(
        model, TOKEN_EXAMPLE * 2, rows, (unread,),
        copies=dict.fromkeys(copies, "shared.weight"),
    )  # fmt: skip


def _stack(
    theirs: str, ours: str, layers: int, names: dict[str, str], mlp: int, gated: bool
) -> list[TensorRule]:
    """Return the rules of a stack, where `mlp` is the MLP's index in a layer's parts."""
    own = {"layer_norm": "mlp_norm", "DenseReluDense.wo": "mlp/down"}
    own |= {"DenseReluDense.wi_0": "mlp/gate"} if gated else {}
    own[f"DenseReluDense.{'wi_1' if gated else 'wi'}"] = "mlp/up"
    names = names | {f"{mlp}.{name}": part for name, part in own.items()}
    biases = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return [
        *per_layer(layers, parts(
            f"{theirs}.block.{{}}.layer", f"{ours}/layers_{{}}", names
        )),
        TensorRule(biases, f"{ours}/relative_bias", transposed()),
        *norm(f"{theirs}.final_layer_norm", f"{ours}/norm"),
    ]  # fmt: skip
