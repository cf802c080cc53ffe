"""Strings into strings, character by character: dates into ISO dates, or a file of your pairs."""

import hashlib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments import plots
from experiments.runs.failures import RunError
from experiments.tasks import dates
from experiments.tasks.dates import Pair, Split
from experiments.tasks.task import Batch, Params, contents, measured, shuffled
from flax_mha import DecoderBlock, EncoderBlock, MultiHeadAttention
from flax_mha.models import Decoder, Encoder, LanguageModel, TokenEmbedding, Translator
from flax_mha.models.generation import Generated, generate
from flax_mha.positions import Rotary

START, END, UNKNOWN = 0, 1, 2  # tokens that are no characters; padding is END
EVERY = 10  # of the pairs of a file, one is held out
ROWS = 500  # of a test batch
DRAWN = 6  # test pairs in the picture


class Vocabulary:
    """Characters as tokens."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._characters = sorted({c for string in strings for c in string})
        self._tokens = {c: UNKNOWN + 1 + i for i, c in enumerate(self._characters)}

    def __len__(self) -> int:
        # A multiple of 8, so that it can be divided over devices.
        return -(-(UNKNOWN + 1 + len(self._characters)) // 8) * 8

    def encode(self, string: str, length: int) -> np.ndarray:
        """Tokens int32 [length], padded."""
        tokens = [self._tokens.get(c, UNKNOWN) for c in string]
        return np.asarray(tokens + [END] * (length - len(tokens)), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """The characters up to the end."""
        ended = np.flatnonzero(tokens == END)
        tokens = tokens[: ended[0]] if len(ended) else tokens
        known = (t - UNKNOWN - 1 for t in tokens)
        return "".join(
            self._characters[t] if 0 <= t < len(self._characters) else "�" for t in known
        )


def read(path: str) -> Split:
    """The pairs of a file, every tenth of which is held out.

    Args:
      path: of a file whose lines are a source, a tab and a target.

    Raises:
      RunError: if there is no such file, or a line is something else.
    """
    try:
        lines = contents(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise RunError(f"config.data.path must be a text file of pairs: {error}") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        source, tab, target = line.partition("\t")
        if not (source and tab and target) or "\t" in target:
            raise RunError(
                f"each line of {path} must be a source, a tab and a target, got {line!r} in line "
                f"{number}"
            )
        pairs.append((source, target))
    # A pair that is there twice must not be learnt from and asked.
    pairs = list(dict.fromkeys(pairs))
    if len(pairs) < EVERY:
        raise RunError(f"{path} must hold at least {EVERY} different pairs, got {len(pairs)}")
    train = [pair for i, pair in enumerate(pairs) if i % EVERY]
    return Split(train, train, pairs[::EVERY], [])


def translator(config: ConfigDict, vocab_size: int) -> Translator:
    """A small encoder-decoder: pre-norm blocks, rotary positions, one table for all."""

    def attention(rotary: Rotary | None = None) -> MultiHeadAttention:
        return MultiHeadAttention(config.num_heads, rotary=rotary, kernel=config.kernel)

    fields = {
        "mlp_dim": config.mlp_dim, "norm": config.norm, "activation": config.activation,
        "dropout_rate": config.dropout_rate,
    }  # fmt: skip
    encoder = EncoderBlock(attention(Rotary()), **fields)
    decoder = DecoderBlock(attention(Rotary()), cross_attention=attention(), **fields)
    return Translator(
        Encoder(config.encoder_layers, encoder),
        LanguageModel(
            TokenEmbedding(vocab_size, config.features),
            Decoder(config.decoder_layers, decoder),
            dropout_rate=config.dropout_rate,
        ),
    )


class Translation:
    """Which string a string is turned into: a `Task`."""

    objective = ""

    def __init__(self, config: ConfigDict) -> None:
        self.config = config
        self.training = measured(config)
        self.split = read(config.data.path) if config.data.path else dates.load()
        sources, targets = zip(*self.split.sample, strict=True)
        self.vocabulary = Vocabulary([*sources, *targets])
        tested = [*self.split.test, *self.split.unseen]
        self.source_length = max(map(len, [*sources, *(source for source, _ in tested)]))
        self.target_length = 1 + max(map(len, [*targets, *(target for _, target in tested)]))
        self.model = translator(config.model, len(self.vocabulary))

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        return self.model.init(key, tokens, tokens, deterministic=True)["params"]

    def batches(self, seed: int, batch_size: int, rows: np.ndarray) -> grain.IterDataset:
        """Endless shuffled pairs, see `arrays`."""
        train = self.split.train
        indices = shuffled(len(train), batch_size, seed)
        return indices.map(lambda i: self.arrays([train[int(j)] for j in i[rows]]))

    def test_batches(self) -> list[Batch]:
        """Held-out pairs, and, weighed apart, those in a style that is not trained on."""
        test, unseen = self.split.test, self.split.unseen
        batch = dict(self.arrays([*test, *unseen]))
        total = len(test) + len(unseen)
        is_test = np.arange(total) < len(test)
        batch["weight"] = np.ones(total, np.float32)
        # So that the sum over all rows by `weight` is the mean over those meant.
        batch["test"] = (is_test * total / len(test)).astype(np.float32)
        batch["unseen"] = (~is_test * total / max(len(unseen), 1)).astype(np.float32)
        return [{k: x[i : i + ROWS] for k, x in batch.items()} for i in range(0, total, ROWS)]

    def arrays(self, pairs: Sequence[Pair]) -> Batch:
        """`source` int32 [n, S], its `length` [n], and `target` int32 [n, T] with its end."""
        encode = self.vocabulary.encode
        return {
            "source": np.stack([encode(source, self.source_length) for source, _ in pairs]),
            "length": np.asarray([len(source) for source, _ in pairs], np.int32),
            "target": np.stack([encode(target, self.target_length) for _, target in pairs]),
        }

    def loss(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross entropy of each character of the target, and of its end."""
        logits = self._logits(params, batch, deterministic=False, rngs={"dropout": key})
        losses, real = _losses(logits, batch["target"])
        return losses.sum() / real.sum(), {}

    def evaluate(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Cross entropy, and the share of targets that greedy decoding gives exactly."""
        losses, real = _losses(self._logits(params, batch), batch["target"])
        found = self.translate(params, batch["source"], batch["length"])
        exact = jnp.all(found.tokens == batch["target"], axis=-1).astype(jnp.float32)
        metrics = {
            "loss": jnp.sum(losses.sum(-1) / real.sum(-1) * batch["test"]),
            "exact": jnp.sum(exact * batch["test"]),
            "count": batch["weight"].sum(),
        }
        if self.split.unseen:
            metrics["exact_unseen"] = jnp.sum(exact * batch["unseen"])
        return metrics

    def translate(
        self, params: Params, source: jax.Array, length: jax.Array, **options: Any
    ) -> Generated:
        """Targets of sources [n, S], greedy unless the options of `generate` say otherwise."""
        return generate(
            self.model, {"params": params}, source, lengths=length, start=START, eos=END,
            **{"max_new_tokens": self.target_length, **options},
        )  # fmt: skip

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """Exact matches among the held-out pairs, and in the style that was not trained on."""
        text = f"exact match: {self.score(metrics['exact'].mean())} of held-out pairs"
        if "exact_unseen" in metrics:
            style = " ".join(dates.UNSEEN)
            text += f", {self.score(metrics['exact_unseen'].mean())} in the unseen style {style}"
        return text

    def score(self, value: float) -> str:
        """A share in percent."""
        return f"{value:.1%}"

    def fingerprint(self) -> str:
        """The SHA-256 of the sampled and the held-out pairs."""
        pairs = [*self.split.sample, *self.split.test, *self.split.unseen]
        return hashlib.sha256("\n".join(map("\t".join, pairs)).encode()).hexdigest()

    def baselines(self) -> dict[str, float]:
        """Babel's own parser, on its own dates."""
        if self.config.data.path:
            return {}
        return {"babel.parse_date, any style": dates.parsed_by_babel(self.split.test)}

    def draw(self, params: Params, workdir: Path) -> None:
        """`alignment.png`: which characters of some held-out sources each output looks at."""
        pairs = drawn(self.split.test)
        batch = self.arrays(pairs)

        @jax.jit
        def observe(params: Params) -> tuple[jax.Array, Any]:
            found = self.translate(params, batch["source"], batch["length"]).tokens
            observed = {**batch, "target": found}
            return found, self._logits(params, observed, sow_weights=True, mutable="intermediates")

        found, (_, sown) = jax.device_get(observe(params))
        last = sown["intermediates"]["decoder"]["decoder"]
        last = last[f"layers_{self.config.model.decoder_layers - 1}"]["cross_attention"]
        weights = last["attention_weights"][0].mean(axis=1)  # [n, T, S], over the heads
        plots.alignment(
            workdir / "alignment.png",
            [source for source, _ in pairs],
            [self.vocabulary.decode(tokens) for tokens in found],
            [target for _, target in pairs],
            weights, "weight, mean over the heads of the last layer",
        )  # fmt: skip

    def respond(self, params: Params, prompt: str, say: Callable[[str], None], **o: Any) -> None:
        """Says the target of a source, character by character unless beams are followed."""
        if not 1 <= len(prompt) <= self.source_length:
            raise RunError(
                f"--prompt must have 1 to {self.source_length} characters, as the sources that the "
                f"model has seen, got {len(prompt)}"
            )
        source = jnp.asarray(self.vocabulary.encode(prompt, self.source_length)[None])
        options = {name: value for name, value in o.items() if value is not None}

        def show(step: int, tokens: np.ndarray) -> None:
            say(self.vocabulary.decode(tokens))

        if options.get("beams", 1) == 1:
            options["callback"] = show
        found = self.translate(params, source, jnp.asarray([len(prompt)]), **options)
        if "callback" not in options:
            say(self.vocabulary.decode(np.asarray(found.tokens[0])))

    def _logits(self, params: Params, batch: Batch, **call: Any) -> Any:
        target = batch["target"]
        begun = jnp.pad(target[:, :-1], [(0, 0), (1, 0)], constant_values=START)
        call = {"source_lengths": batch["length"], "deterministic": True} | call
        return self.model.apply({"params": params}, batch["source"], begun, **call)


def _losses(logits: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cross entropy of each token up to the end, and which those are, float32 [n, T]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    ends = (target == END).astype(losses.dtype)
    real = (jnp.cumsum(ends, axis=-1) == ends).astype(losses.dtype)  # no end before it
    return losses * real, real


def drawn(pairs: Sequence[Pair]) -> list[Pair]:
    """Some pairs for a picture: in scripts that its font has, if there are, and in various ones."""
    first: dict[str, Pair] = {}
    for pair in pairs:
        letter = next(filter(str.isalpha, pair[0]), None)
        if letter:
            first.setdefault(unicodedata.name(letter, "").split(" ")[0], pair)
    various = dict.fromkeys([*first.values(), *pairs])
    return sorted(various, key=lambda pair: not plots.drawable(pair[0]))[:DRAWN]
