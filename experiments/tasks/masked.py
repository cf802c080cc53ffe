"""Hidden bytes of Python's own reference manual, guessed from all others around them."""

from typing import Any

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.tasks import text
from experiments.tasks.checks import check_size, read_remat
from experiments.tasks.task import Batch, Metrics, Params, shuffled
from flax_mha import EncoderBlock, MultiHeadAttention
from flax_mha.layer.linear import Projection
from flax_mha.models import Encoder, TokenEmbedding
from flax_mha.positions import Rotary

BYTES = 256
HIDDEN = 255  # the token of a hidden byte: no byte of UTF-8


class MaskedModel(nn.Module):
    """A model that guesses each token's byte from all tokens of its row."""

    encoder: Encoder  # whose attention knows positions by rotation
    features: int  # D

    @nn.compact
    def __call__(self, tokens: jax.Array, **call: Any) -> jax.Array:
        """Map int [B, T] to logits [B, T, 256], float32."""
        layer = self.encoder.first.attention
        embed = TokenEmbedding(BYTES, self.features, dtype=layer.dtype, name="embedding")
        x = self.encoder(embed(tokens), **call)
        head = Projection(
            (BYTES,), ("embed", None), rows=("batch", "norm_length"), dtype=jnp.float32, name="head"
        )
        return head(x)


def masked_model(m: ConfigDict) -> MaskedModel:
    """Return the small encoder of `config.model`, with rotary positions."""
    attention = MultiHeadAttention(
        m.num_heads, num_kv_heads=m.num_kv_heads, kernel=m.kernel, dtype=jnp.dtype(m.dtype),
        rotary=Rotary(),
    )  # fmt: skip
    block = EncoderBlock(
        attention, m.mlp_dim, norm=m.norm, activation=m.activation, dropout_rate=m.dropout_rate,
        remat=read_remat(m),
    )  # fmt: skip
    return MaskedModel(Encoder(m.num_layers, block, scan=m.scan), m.features)


class Masked:
    """The guess of hidden bytes, as in BERT's pre-training: a `Task`.

    Source: Devlin et al., "BERT", 2018; every hidden byte becomes the same token.
    """

    def __init__(self, config: ConfigDict) -> None:
        self.config, self.model = config, masked_model(config.model)
        self.train, self.test = (np.frombuffer(part, np.uint8) for part in text.load())
        check_size("config.length", config.length, len(self.test), "held-out bytes")

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters, whose shapes do not depend on the length."""
        return self.model.init(key, jnp.zeros((1, 1), jnp.int32), deterministic=True)["params"]

    def data(self) -> list[bytes]:
        """Return the bytes of the text."""
        return [self.train.tobytes(), self.test.tobytes()]

    def batches(self, seed: int, batch_size: int, rows: np.ndarray) -> grain.IterDataset:
        """Return endless `bytes` uint8 [rows, T], each a stretch that begins anywhere."""
        T = self.config.length
        starts = shuffled(len(self.train) - T + 1, batch_size, seed)
        return starts.map(lambda i: {"bytes": self.train[i[rows, None] + np.arange(T)]})

    def test_batches(self) -> list[Batch]:
        """Return the held-out bytes as rows of one batch, the same ones hidden in every run."""
        count = len(self.test) // self.config.length
        values = self.test[: count * self.config.length].reshape(count, -1)
        hidden = np.random.default_rng(0).random(values.shape) < self.config.hidden
        return [{"bytes": values, "hidden": hidden, "weight": np.ones(count, np.float32)}]

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """Return the cross entropy of the hidden bytes, in nats."""
        hide_key, dropout_key = jax.random.split(key)
        hidden = jax.random.bernoulli(hide_key, self.config.hidden, batch["bytes"].shape)
        call = {"deterministic": False, "rngs": {"dropout": dropout_key}}
        losses, correct = self._judge(params, batch["bytes"], hidden, **call)
        count = jnp.maximum(hidden.sum(), 1)
        return losses.sum() / count, {"accuracy": correct.sum() / count}

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        """Return the cross entropy and the accuracy of the hidden bytes."""
        losses, correct = self._judge(params, batch["bytes"], batch["hidden"], deterministic=True)
        weight = batch["weight"][:, None]
        count = jnp.sum(batch["hidden"].astype(weight.dtype) * weight)
        sums = {"loss": jnp.sum(losses * weight), "accuracy": jnp.sum(correct * weight)}
        return {**sums, "count": count}

    def _judge(
        self, params: Params, values: jax.Array, hidden: jax.Array, **call: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Return the loss and the correctness of each guess [B, T], 0 where none is hidden."""
        labels = values.astype(jnp.int32)
        tokens = jnp.where(hidden, HIDDEN, labels)
        logits: Any = self.model.apply({"params": params}, tokens, **call)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        right = logits.argmax(-1) == labels
        return jnp.where(hidden, losses, 0.0), (hidden & right).astype(losses.dtype)
