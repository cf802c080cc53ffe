"""Text, byte by byte: Python's own documentation, or a file of yours."""

import codecs
import gzip
import hashlib
import lzma
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
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
from experiments.tasks.task import Batch, Params, contents, measured, shuffled
from flax_mha import DecoderBlock, MultiHeadAttention
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding
from flax_mha.models.generation import generate
from flax_mha.positions import Rotary

BYTES = 256
START = b"\n"  # what stands before a text
EVERY = 10  # of the topics, or of a file's tenths, one is held out
ROWS = 64  # windows of a test batch
SPLITS = ("test", "validation")


def load(path: str = "", split: str = "test") -> tuple[bytes, bytes]:
    """The training and the held-out text.

    Of the topics in `pydoc_data.topics`, sorted by name, every tenth is held out, from the first
    on; of a file, its last tenth. They vary with the version of Python: runs record their hash.

    Args:
      path: a file of text; "" for the topics.
      split: "test"; or "validation", to choose settings by: the training text split once more.

    Raises:
      RunError: if there is no such file or split, or too little text.
    """
    if split not in SPLITS:
        raise RunError(f"config.data.split must be one of {SPLITS}, got {split!r}")
    parts = _topics() if not path else _tenths(path)
    first = 0 if not path else EVERY - 1
    held = parts[first::EVERY]
    parts = [part for i, part in enumerate(parts) if i % EVERY != first]
    if split == "validation":
        held, parts = parts[::EVERY], [part for i, part in enumerate(parts) if i % EVERY]
    joint = b"" if path else b"\n"
    return joint.join(parts), joint.join(held)


def _topics() -> list[bytes]:
    from pydoc_data.topics import topics

    return [topics[name].encode() for name in sorted(topics)]


def _tenths(path: str) -> list[bytes]:
    text = contents(path)
    if len(text) < EVERY**2:  # So that a tenth of a tenth is left.
        raise RunError(f"{path} must hold at least {EVERY**2} bytes, got {len(text)}; give more")
    size = -(-len(text) // EVERY)
    return [text[i : i + size] for i in range(0, len(text), size)]


def _check_stride(stride: int, length: int) -> None:
    """Raise a RunError unless windows that far apart leave out no byte."""
    if not 1 <= stride <= length:
        raise RunError(
            f"config.data.stride must be in 1 … config.length={length}, got {stride}; try "
            f"{max(1, length // 4)}"
        )


def windows(text: bytes, length: int, stride: int) -> Batch:
    """Stretches of a text in which each of its bytes is predicted once.

    Args:
      text: n bytes.
      length: T, bytes that the model sees.
      stride: from one window to the next. A byte is predicted from all that the window has before
        it, at least T − stride bytes, where the text has as many.

    Returns:
      `tokens` uint8 [windows, T + 1], the last T of which are predicted, and their `weight`
      float32 [windows, T]: 1 where a byte is predicted that no window before predicts.
    """
    _check_stride(stride, length)
    n = len(text)
    starts = range(0, max(1, n - length + stride), stride)
    padded = np.frombuffer(START + text + bytes(length + stride), np.uint8)
    tokens = np.stack([padded[start : start + length + 1] for start in starts])
    first = np.asarray(starts)[:, None]
    new = (np.arange(length) >= length - stride) | (first == 0)
    there = first + np.arange(length) < n
    return {"tokens": tokens, "weight": (new & there).astype(np.float32)}


def witten_bell(train: bytes, test: bytes, order: int = 6) -> float:
    """Bits per byte of an n-gram model, each order interpolated with the next lower one.

        P(w | h) = (c(h w) + u(h) · P(w | h′)) / (c(h) + u(h))

    with counts c in the training text, u(h) different bytes after h, and h′ the history h without
    its first byte; below the last, every byte is equally likely.

    Source: Witten and Bell, "The Zero-Frequency Problem", 1991 (method C, interpolated).
    """
    follow: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
    train, n = START + train, len(test)
    for i in range(1, len(train)):
        for h in range(min(order, i + 1)):
            follow[train[i - h : i]][train[i]] += 1
    totals = {history: counts.total() for history, counts in follow.items()}
    text, bits = START + test, 0.0
    for i in range(1, n + 1):
        p = 1 / BYTES
        for h in range(min(order, i + 1)):
            history = text[i - h : i]
            if history not in totals:
                break
            counts = follow[history]
            p = (counts[text[i]] + len(counts) * p) / (totals[history] + len(counts))
        bits -= math.log2(p)
    return bits / n


def language_model(config: ConfigDict) -> LanguageModel:
    """Bytes to logits of the next one: pre-norm blocks, rotary positions, grouped heads."""
    attention = MultiHeadAttention(
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        rotary=Rotary(),
        use_bias=False,
        dropout_rate=config.attention_dropout_rate,
        kernel=config.kernel,
    )
    block = DecoderBlock(
        attention,
        config.mlp_dim,
        norm=config.norm,
        activation=config.activation,
        gated=config.gated,
        dropout_rate=config.dropout_rate,
    )
    return LanguageModel(
        TokenEmbedding(BYTES, config.features),
        Decoder(config.num_layers, block),
        tied=config.tied,
        dropout_rate=config.dropout_rate,
    )


class Text:
    """Which byte comes next: a `Task`."""

    objective = ""

    def __init__(self, config: ConfigDict) -> None:
        self.config = config
        self.training = measured(config, "any context")
        self.train, self.test = load(config.data.path, config.data.split)
        if len(self.train) <= config.length:
            raise RunError(
                f"the training text must be longer than config.length={config.length} bytes, got "
                f"{len(self.train)}; give more text, or a shorter length"
            )
        _check_stride(config.data.stride, config.length)
        self.model = language_model(config.model)

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters."""
        tokens = jnp.zeros((1, self.config.length), jnp.int32)
        return self.model.init(key, tokens, deterministic=True)["params"]

    def batches(self, seed: int, batch_size: int, rows: np.ndarray) -> grain.IterDataset:
        """Endless `tokens` uint8 [rows, T + 1], from anywhere in the training text."""
        text, T = np.frombuffer(START + self.train, np.uint8), self.config.length
        places = np.lib.stride_tricks.sliding_window_view(text, T + 1)
        indices = shuffled(len(places), batch_size, seed)
        return indices.map(lambda i: {"tokens": places[i[rows]]})

    def test_batches(self) -> list[Batch]:
        """Windows over the whole held-out text, see `windows`."""
        whole = windows(self.test, self.config.length, self.config.data.stride)
        count = -(-len(whole["tokens"]) // ROWS)
        pad = count * ROWS - len(whole["tokens"])
        padded = {name: np.pad(x, [(0, pad), (0, 0)]) for name, x in whole.items()}
        return [{name: np.split(x, count)[i] for name, x in padded.items()} for i in range(count)]

    def loss(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross entropy of each next byte, in nats and in bits."""
        losses = self._losses(params, batch, deterministic=False, rngs={"dropout": key})
        return losses.mean(), {"bits_per_byte": losses.mean() / math.log(2)}

    def evaluate(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Cross entropy of the bytes that a window is to predict."""
        weight = batch["weight"]
        loss = jnp.sum(self._losses(params, batch) * weight)
        return {"loss": loss, "bits_per_byte": loss / math.log(2), "count": weight.sum()}

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """Bits per byte of the held-out text."""
        bits = metrics["bits_per_byte"]
        spread = f" ± {bits.std(ddof=1):.3f}" if bits.size > 1 else ""
        return f"held-out text: {self.score(bits.mean())}{spread}"

    def score(self, value: float) -> str:
        """Bits per byte."""
        return f"{value:.3f} bits per byte"

    def fingerprint(self) -> str:
        """The SHA-256 of training and held-out text."""
        return hashlib.sha256(self.train + b"\0" + self.test).hexdigest()

    def baselines(self) -> dict[str, float]:
        """Two compressors of the held-out text alone, and an n-gram model of the training text."""
        n = len(self.test)
        return {
            "gzip": 8 * len(gzip.compress(self.test, 9)) / n,
            "xz": 8 * len(lzma.compress(self.test, preset=9)) / n,
            "Witten-Bell 6-gram": witten_bell(self.train, self.test),
        }

    def draw(self, params: Params, workdir: Path) -> None:
        """`context.png`: how much better a byte is predicted the more was seen before it."""
        T = self.config.length
        apart = windows(self.test, T, T)
        losses = np.asarray(jax.jit(self._losses)(params, apart))
        weight = apart["weight"]
        bits = (losses * weight).sum(0) / np.maximum(weight.sum(0), 1) / math.log(2)
        plots.by_place(workdir / "context.png", np.where(weight.any(0), bits, np.nan))

    def respond(
        self, params: Params, prompt: str, say: Callable[[str], None], **options: Any
    ) -> None:
        """Says how a text goes on, byte by byte, as far as the model's context reaches."""
        given = (START + prompt.encode())[-self.config.length :]
        room = self.config.length - len(given) + 1
        options = {name: value for name, value in options.items() if value is not None}
        count = options.pop("max_new_tokens", room)
        if not 1 <= count <= room:
            raise RunError(
                f"--max_new_tokens must be in 1 … {room}: the model has seen {self.config.length} "
                f"bytes at once, of which the prompt takes {len(given)}, got {count}"
            )
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def show(step: int, tokens: np.ndarray) -> None:
            say(utf8.decode(tokens.astype(np.uint8).tobytes()))

        if options.get("beams", 1) == 1:
            options["callback"] = show
        tokens = jnp.asarray(np.frombuffer(given, np.uint8)[None], jnp.int32)
        found = generate(
            self.model, {"params": params}, tokens, max_new_tokens=count,
            # Prompts of all lengths find the compiled step again.
            capacity=self.config.length, **options,
        )  # fmt: skip
        if "callback" not in options:
            show(count, np.asarray(found.tokens[0]))

    def _losses(self, params: Params, batch: Batch, **call: Any) -> jax.Array:
        tokens = batch["tokens"].astype(jnp.int32)
        call = {"deterministic": True} | call
        logits = self.model.apply({"params": params}, tokens[:, :-1], **call)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
