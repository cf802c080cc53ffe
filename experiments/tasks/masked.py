"""Masked bytes of Python's own reference manual, which every Python brings along: `pydoc_data`."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments import plots
from experiments.runs.failures import RunError
from experiments.tasks import text
from experiments.tasks.task import Batch, Params, measured, shuffled
from flax_mha import EncoderBlock, MultiHeadAttention
from flax_mha.layer.linear import Projection
from flax_mha.models import Encoder, TokenEmbedding
from flax_mha.positions import Rotary

BYTES = 256
HIDDEN = 255  # in the place of a byte that is to be guessed: no byte of UTF-8
DRAWN = 256  # tokens at most in the picture of the attention


class MaskedModel(nn.Module):
    """Guesses each token's byte from all tokens of its row.

    Attributes:
      encoder: the stack; its attention knows positions by rotation.
      features: D.
    """

    encoder: Encoder
    features: int

    @nn.compact
    def __call__(self, tokens: jax.Array, **call: Any) -> jax.Array:
        """Maps int [B, T] to logits [B, T, 256], float32."""
        layer = self.encoder.first.attention
        embed = TokenEmbedding(BYTES, self.features, dtype=layer.dtype, name="embedding")
        x = self.encoder(embed(tokens), **call)
        head = Projection(
            (BYTES,), ("embed", None), rows=("batch", "norm_length"), dtype=jnp.float32, name="head"
        )
        return head(x)


class Masked:
    """Which bytes were hidden: a `Task`, as in BERT's pre-training.

    Source: Devlin et al., "BERT", 2018; every hidden byte becomes the same token.
    """

    objective = ""

    def __init__(self, config: ConfigDict) -> None:
        self.config = config
        self.training = measured(config)
        self.train, self.test = (np.frombuffer(part, np.uint8) for part in text.load())
        if not 0 < config.length <= len(self.test):
            raise RunError(
                f"config.length must be at least 1 and at most the {len(self.test)} bytes that "
                f"are held out, got {config.length}"
            )
        m = config.model
        attention = MultiHeadAttention(
            m.num_heads, num_kv_heads=m.num_kv_heads, kernel=m.kernel, dtype=jnp.dtype(m.dtype),
            rotary=Rotary(),
        )  # fmt: skip
        block = EncoderBlock(
            attention, m.mlp_dim, norm=m.norm, activation=m.activation,
            dropout_rate=m.dropout_rate, remat=m.remat,
        )  # fmt: skip
        self.model = MaskedModel(Encoder(m.num_layers, block, scan=m.scan), m.features)

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters."""
        # Of one token: shapes of parameters do not depend on the length.
        return self.model.init(key, jnp.zeros((1, 1), jnp.int32), deterministic=True)["params"]

    def batches(self, seed: int, batch_size: int, rows: np.ndarray) -> grain.IterDataset:
        """Endless `bytes` uint8 [rows, T], each a stretch that begins anywhere."""
        T = self.config.length
        starts = shuffled(len(self.train) - T + 1, batch_size, seed)
        return starts.map(lambda i: {"bytes": self.train[i[rows, None] + np.arange(T)]})

    def test_batches(self) -> list[Batch]:
        """The held-out bytes in rows, one batch; what is hidden in them is drawn once for all."""
        T = self.config.length
        count = len(self.test) // T
        hidden = np.random.default_rng(0).random((count, T)) < self.config.hidden
        return [{
            "bytes": self.test[: count * T].reshape(count, T), "hidden": hidden,
            "weight": np.ones(count, np.float32),
        }]  # fmt: skip

    def loss(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross entropy of the hidden bytes, in nats."""
        hide_key, dropout_key = jax.random.split(key)
        hidden = jax.random.bernoulli(hide_key, self.config.hidden, batch["bytes"].shape)
        losses, correct = self._judge(
            params, batch["bytes"], hidden, deterministic=False, rngs={"dropout": dropout_key}
        )
        count = jnp.maximum(hidden.sum(), 1)
        return losses.sum() / count, {"accuracy": correct.sum() / count}

    def evaluate(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Cross entropy and accuracy of the hidden bytes."""
        losses, correct = self._judge(params, batch["bytes"], batch["hidden"])
        weight = batch["weight"][:, None]
        return {
            "loss": jnp.sum(losses * weight),
            "accuracy": jnp.sum(correct * weight),
            "count": jnp.sum(batch["hidden"].astype(weight.dtype) * weight),
        }

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """Bits and accuracy of a hidden byte, means over the seeds."""
        bits, accuracy = metrics["loss"].mean() / np.log(2), 100 * metrics["accuracy"].mean()
        return f"test {bits:.2f} bits a hidden byte, {accuracy:.1f}% right"

    def score(self, value: float) -> str:
        """A share in percent."""
        return f"{value:.1%}"

    def fingerprint(self) -> str:
        """The SHA-256 of training and held-out text."""
        return hashlib.sha256(self.train.tobytes() + b"\0" + self.test.tobytes()).hexdigest()

    def baselines(self) -> dict[str, float]:
        """The byte that stood most often where it stands, or between such neighbours."""
        return {
            "the most frequent byte": self._frequent(lambda x: np.zeros(len(x) - 2, np.int64)),
            "the most frequent between its neighbours": self._frequent(
                lambda x: x[:-2].astype(np.int64) * BYTES + x[2:]
            ),
        }

    def draw(self, params: Params, workdir: Path) -> None:
        """`attention.png`: how far each head of each layer looks, on the first held-out bytes."""
        tokens = self.test[None, : min(DRAWN, self.config.length)].astype(np.int32)

        @jax.jit
        def observe(params: Params, tokens: jax.Array) -> Any:
            call: dict[str, Any] = {"sow_weights": True, "deterministic": True}
            call["mutable"] = ["intermediates"]
            return self.model.apply({"params": params}, tokens, **call)[1]

        sown = jax.tree.leaves(jax.device_get(observe(params, tokens)))
        T = tokens.shape[1]
        weights = np.concatenate([x.reshape(-1, x.shape[-3], T, T) for x in sown])
        plots.by_distance(workdir / "attention.png", weights)

    def _judge(
        self, params: Params, values: jax.Array, hidden: jax.Array, **call: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Loss, and whether the likeliest byte is the right one, [B, T]; 0 where none is hidden."""
        labels = values.astype(jnp.int32)
        tokens = jnp.where(hidden, HIDDEN, labels)
        call = {"deterministic": True} | call
        logits: Any = self.model.apply({"params": params}, tokens, **call)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        right = logits.argmax(-1) == labels
        return jnp.where(hidden, losses, 0.0), (hidden & right).astype(losses.dtype)

    def _frequent(self, context: Any) -> float:
        """The share of held-out bytes guessed right by the likeliest byte in each context."""
        counts = np.zeros((BYTES**2, BYTES), np.int32)
        np.add.at(counts, (context(self.train), self.train[1:-1]), 1)
        return float((counts.argmax(1)[context(self.test)] == self.test[1:-1]).mean())
