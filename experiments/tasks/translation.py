"""Strings into strings, character by character: dates into ISO dates, or a file of your pairs."""

from collections.abc import Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.common.failures import RunError
from experiments.tasks import dates
from experiments.tasks.checks import read_file
from experiments.tasks.dates import Pair, Split
from experiments.tasks.task import Batch, Metrics, Params, shuffled
from flax_mha import DecoderBlock, EncoderBlock, MultiHeadAttention
from flax_mha.models import Decoder, Encoder, LanguageModel, TokenEmbedding, Translator
from flax_mha.models.generation import Generated, generate
from flax_mha.positions import Rotary

START, END, UNKNOWN = 0, 1, 2  # tokens that are no characters; padding is END
EVERY = 10  # one of so many pairs of a file is held out
ROWS = 500  # of a test batch


class Vocabulary:
    """The characters of some strings as tokens."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._characters = sorted({c for string in strings for c in string})
        self._tokens = {c: UNKNOWN + 1 + i for i, c in enumerate(self._characters)}

    def __len__(self) -> int:
        # A multiple of 8, so that it can be divided over devices.
        return -(-(UNKNOWN + 1 + len(self._characters)) // 8) * 8

    def encode(self, string: str, length: int) -> np.ndarray:
        """Return tokens int32 [length], padded."""
        tokens = [self._tokens.get(c, UNKNOWN) for c in string]
        return np.asarray(tokens + [END] * (length - len(tokens)), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the characters up to the end."""
        ended = np.flatnonzero(tokens == END)
        tokens = tokens[: ended[0]] if len(ended) else tokens
        known = dict(enumerate(self._characters, UNKNOWN + 1))
        return "".join(known.get(token, "�") for token in tokens.tolist())


def read(path: str) -> Split:
    """Return the different pairs of a file, every tenth held out.

    Each line is a source, a tab and a target.
    """
    try:
        lines = read_file(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise RunError(f"config.data.path must be a text file of pairs: {error}") from None
    # A pair that is there twice must not be both learnt from and asked.
    unique: dict[Pair, None] = {}
    for number, line in enumerate(lines, 1):
        source, tab, target = line.partition("\t")
        if not (source and tab and target) or "\t" in target:
            raise RunError(
                f"each line of {path} must be a source, a tab and a target, got {line!r:.100} in "
                f"line {number}"
            )
        unique[source, target] = None
    pairs = list(unique)
    if len(pairs) < EVERY:
        raise RunError(f"{path} must hold at least {EVERY} different pairs, got {len(pairs)}")
    train = [pair for i, pair in enumerate(pairs) if i % EVERY]
    return Split(train, train, pairs[::EVERY], [])


def translator(m: ConfigDict, vocab_size: int) -> Translator:
    """Return the encoder-decoder of `config.model`: pre-norm, rotary positions, one table."""

    def attention(rotary: Rotary | None = None) -> MultiHeadAttention:
        return MultiHeadAttention(m.num_heads, rotary=rotary, kernel=m.kernel)

    fields = {name: m[name] for name in ("mlp_dim", "norm", "activation", "dropout_rate")}
    block = EncoderBlock(attention(Rotary()), **fields)
    cross = DecoderBlock(attention(Rotary()), cross_attention=attention(), **fields)
    embedding, decoder = TokenEmbedding(vocab_size, m.features), Decoder(m.decoder_layers, cross)
    model = LanguageModel(embedding, decoder, dropout_rate=m.dropout_rate)
    return Translator(Encoder(m.encoder_layers, block), model)


class Translation:
    """The translation of one string into another: a `Task`."""

    def __init__(self, config: ConfigDict) -> None:
        self.config = config
        self.split = read(config.data.path) if config.data.path else dates.load()
        sources, targets = zip(*self.split.sample, strict=True)
        self.vocabulary = Vocabulary([*sources, *targets])
        tested = [*self.split.test, *self.split.unseen]
        self.source_length = max(map(len, [*sources, *(source for source, _ in tested)]))
        self.target_length = 1 + max(map(len, [*targets, *(target for _, target in tested)]))
        self.model = translator(config.model, len(self.vocabulary))

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        return self.model.init(key, tokens, tokens, deterministic=True)["params"]

    def data(self) -> list[bytes]:
        """Return the pairs."""
        pairs = [*self.split.sample, *self.split.test, *self.split.unseen]
        return ["\t".join(pair).encode() for pair in pairs]

    def batches(self, seed: int, batch_size: int, rows: np.ndarray) -> grain.IterDataset:
        """Return endless shuffled pairs, see `arrays`."""
        train = self.split.train
        indices = shuffled(len(train), batch_size, seed)
        return indices.map(lambda i: self.arrays([train[int(j)] for j in i[rows]]))

    def test_batches(self) -> list[Batch]:
        """Return held-out pairs, and, weighed apart, pairs in a style that is not trained on."""
        test, unseen = self.split.test, self.split.unseen
        total = len(test) + len(unseen)
        is_test = np.arange(total) < len(test)
        # The sum over all rows by such a weight, over `count`, is the mean over those meant.
        weights = {
            "weight": np.ones(total), "test": is_test * total / len(test),
            "unseen": ~is_test * total / max(len(unseen), 1),
        }  # fmt: skip
        weights = {name: x.astype(np.float32) for name, x in weights.items()}
        batch = {**self.arrays([*test, *unseen]), **weights}
        return [{k: x[i : i + ROWS] for k, x in batch.items()} for i in range(0, total, ROWS)]

    def arrays(self, pairs: Sequence[Pair]) -> Batch:
        """Return `source` int32 [n, S], its `length` [n], and the `target` int32 [n, T]."""
        encode = self.vocabulary.encode
        return {
            "source": np.stack([encode(source, self.source_length) for source, _ in pairs]),
            "length": np.asarray([len(source) for source, _ in pairs], np.int32),
            "target": np.stack([encode(target, self.target_length) for _, target in pairs]),
        }

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """Return the cross entropy of each character of the target, and of its end."""
        logits = self.logits(params, batch, deterministic=False, rngs={"dropout": key})
        losses, real = _losses(logits, batch["target"])
        return losses.sum() / real.sum(), {}

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        """Return the cross entropy, and the share of targets that greedy decoding gives exactly."""
        losses, real = _losses(self.logits(params, batch), batch["target"])
        found = self.translate(params, batch["source"], batch["length"])
        exact = jnp.all(found.tokens == batch["target"], axis=-1).astype(jnp.float32)
        loss = jnp.sum(losses.sum(-1) / real.sum(-1) * batch["test"])
        metrics = {"loss": loss, "exact": jnp.sum(exact * batch["test"])}
        metrics["count"] = batch["weight"].sum()
        if self.split.unseen:
            metrics["exact_unseen"] = jnp.sum(exact * batch["unseen"])
        return metrics

    def translate(
        self, params: Params, source: jax.Array, length: jax.Array, **options: Any
    ) -> Generated:
        """Return targets of sources [n, S], by greedy decoding or these options of `generate`."""
        options = {"max_new_tokens": self.target_length, "start": START, "eos": END} | options
        return generate(self.model, {"params": params}, source, lengths=length, **options)

    def logits(self, params: Params, batch: Batch, **call: Any) -> Any:
        """Return the logits [n, T, V] of each character of the target."""
        begun = jnp.pad(batch["target"][:, :-1], [(0, 0), (1, 0)], constant_values=START)
        call = {"source_lengths": batch["length"], "deterministic": True} | call
        return self.model.apply({"params": params}, batch["source"], begun, **call)


def _losses(logits: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cross entropy of each token up to the end, and a mask of them, float32 [n, T]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    ends = (target == END).astype(losses.dtype)
    real = (jnp.cumsum(ends, axis=-1) == ends).astype(losses.dtype)  # no end before it
    return losses * real, real
