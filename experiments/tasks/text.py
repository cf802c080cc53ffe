"""Text, by bytes or tokens: Python's own documentation, or a file of yours."""

import math
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.tasks.checks import check_size, read_file, read_remat
from experiments.tasks.task import Batch, Metrics, Params, shuffled
from flax_mha import DecoderBlock, MultiHeadAttention
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding
from flax_mha.positions import Rotary

EVERY = 10  # one of so many topics, or tenths of a file, is held out
ROWS = 64  # windows of a test batch
START = b"\n"  # in front of every text


def load(path: str = "", split: str = "test") -> tuple[bytes, bytes]:
    """Return the training and the held-out text.

    Every tenth topic of `pydoc_data.topics`, sorted by name, is held out, or the last tenth of a
    file. The topics vary with the version of Python: runs record their hash.

    Args:
      path: a file of text; "" for the topics.
      split: "test"; or "validation", to choose settings by: the training text split once more.
    """
    from pydoc_data.topics import topics

    first, joint, parts = 0, b"\n", [topics[name].encode() for name in sorted(topics)]
    if path:
        text = read_file(path, at_least=EVERY**2)  # So that a tenth of a tenth is left.
        size = -(-len(text) // EVERY)
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        first, joint = EVERY - 1, b""
    held = parts[first::EVERY]
    parts = [part for i, part in enumerate(parts) if i % EVERY != first]
    if split == "validation":
        held, parts = parts[::EVERY], [part for i, part in enumerate(parts) if i % EVERY]
    return joint.join(parts), joint.join(held)


class Bytes:
    """The bytes of a text as tokens; `experiments.tasks.tokenizer` has the tokens of a file."""

    size, file = 256, b""  # and no file that defines them

    def encode(self, text: bytes) -> np.ndarray:
        """Return the start token, and those of a text [1 + n]."""
        return np.frombuffer(START + text, np.uint8)


def windows(tokens: np.ndarray, length: int, stride: int) -> Batch:
    """Return stretches of a text that predict each of its tokens once.

    They are `tokens` [windows, T + 1], whose last T are predicted, and their `weight` float32
    [windows, T]: 1 where a token is predicted that no window before predicts.

    Args:
      tokens: the start token and n others.
      length: T, the tokens that the model sees.
      stride: the tokens from one window to the next; each token is predicted from at least
        T − stride tokens before it, where the text has as many.
    """
    check_size("config.data.stride", stride, length, "config.length")
    n = len(tokens) - 1
    starts = range(0, max(1, n - length + stride), stride)
    padded = np.pad(tokens, (0, length + stride))
    rows = np.stack([padded[start : start + length + 1] for start in starts])
    first = np.asarray(starts)[:, None]
    new = (np.arange(length) >= length - stride) | (first == 0)
    there = first + np.arange(length) < n
    return {"tokens": rows, "weight": (new & there).astype(np.float32)}


def language_model(m: ConfigDict, tokens: int) -> LanguageModel:
    """Return the decoder of `config.model`: pre-norm blocks, rotary positions, grouped heads.

    Args:
      m: the config's part `model`.
      tokens: the size of the vocabulary.
    """
    attention = MultiHeadAttention(
        m.num_heads, num_kv_heads=m.num_kv_heads, rotary=Rotary(), use_bias=False,
        dropout_rate=m.attention_dropout_rate, kernel=m.kernel, dtype=jnp.dtype(m.dtype),
    )  # fmt: skip
    block = DecoderBlock(
        attention, m.mlp_dim, norm=m.norm, activation=m.activation, gated=m.gated,
        dropout_rate=m.dropout_rate, remat=read_remat(m),
    )  # fmt: skip
    embedding = TokenEmbedding(tokens, m.features, dtype=attention.dtype)
    decoder = Decoder(m.num_layers, block, scan=m.scan)
    return LanguageModel(embedding, decoder, tied=m.tied, dropout_rate=m.dropout_rate)


class Text:
    """The prediction of the next token: a `Task`."""

    def __init__(self, config: ConfigDict) -> None:
        self.config = config
        self.vocabulary: Any = Bytes()
        if config.data.tokenizer:  # an optional package
            from experiments.tasks.tokenizer import Tokenizer

            self.vocabulary = Tokenizer(config.data.tokenizer)
        self.model = language_model(config.model, self.vocabulary.size)
        self.train, self.test = load(config.data.path, config.data.split)
        self.tokens, self.held = map(self.vocabulary.encode, (self.train, self.test))
        most = len(self.tokens) - 2
        check_size("config.length", config.length, most, "training tokens − 1")
        self.windows = windows(self.held, config.length, config.data.stride)
        # By which the nats of a token become bits of a byte.
        self.scales = [
            (len(tokens) - 1) / len(text) / math.log(2)
            for tokens, text in ((self.tokens, self.train), (self.held, self.test))
        ]

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters."""
        tokens = jnp.zeros((1, self.config.length), jnp.int32)
        return self.model.init(key, tokens, deterministic=True)["params"]

    def data(self) -> list[bytes]:
        """Return the text, and the file that defines its tokens."""
        return [self.train, self.test, self.vocabulary.file]

    def batches(self, seed: int, batch_size: int, rows: np.ndarray) -> grain.IterDataset:
        """Return endless `tokens` [rows, T + 1], from anywhere in the training text."""
        places = np.lib.stride_tricks.sliding_window_view(self.tokens, self.config.length + 1)
        indices = shuffled(len(places), batch_size, seed)
        return indices.map(lambda i: {"tokens": places[i[rows]]})

    def test_batches(self) -> list[Batch]:
        """Return windows over the whole held-out text."""
        count = -(-len(self.windows["tokens"]) // ROWS)
        pad = [(0, count * ROWS - len(self.windows["tokens"])), (0, 0)]
        parts = {name: np.split(np.pad(x, pad), count) for name, x in self.windows.items()}
        return [{name: x[i] for name, x in parts.items()} for i in range(count)]

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """Return the cross entropy of each next token, in nats, and in bits per byte."""
        loss = self.losses(params, batch, deterministic=False, rngs={"dropout": key}).mean()
        return loss, {"bits_per_byte": loss * self.scales[0]}

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        """Return the cross entropy of the tokens that a window is to predict."""
        loss, count = jnp.sum(self.losses(params, batch) * batch["weight"]), batch["weight"].sum()
        return {"loss": loss, "bits_per_byte": loss * self.scales[1], "count": count}

    def losses(self, params: Params, batch: Batch, **call: Any) -> jax.Array:
        """Return the cross entropy of each token after the first [rows, T]."""
        tokens = batch["tokens"].astype(jnp.int32)
        call = {"deterministic": True} | call
        logits = self.model.apply({"params": params}, tokens[:, :-1], **call)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
