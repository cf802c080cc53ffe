"""Handwritten digits: the 1,797 images of 8×8 pixels that come with scikit-learn."""

import math
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.tasks.task import Batch, Params, shuffled
from flax_mha import EncoderBlock, MultiHeadAttention
from flax_mha.models import Classifier, Encoder, PatchEmbedding

CLASSES = 10


def load() -> tuple[Batch, Batch]:
    """Return the training and the test split: `image` float32 [n, 8, 8] in 0 … 1, `label` [n]."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    data = {"image": (digits.images / 16).astype(np.float32), "label": digits.target.astype("i4")}
    # A constant seed, so that every run, resumed or new, holds out the same fifth of the images.
    splits = train_test_split(
        np.arange(len(data["label"])), test_size=0.2, random_state=0, stratify=data["label"]
    )
    train, test = ({name: x[split] for name, x in data.items()} for split in splits)
    return train, test


def augment(
    images: jax.Array, key: jax.Array, *, shift: float, rotate: float, scale: float
) -> jax.Array:
    """Move each image [B, height, width] a little, so that a digit stays the same digit.

    Args:
      images: the images.
      key: the randomness.
      shift: the most pixels that an image moves by, along each axis.
      rotate: the most degrees that it turns by, either way.
      scale: the largest relative change of its size.

    Returns:
      The images [B, height, width], interpolated linearly, 0 beyond the border.
    """
    B, height, width = images.shape
    draws = jax.random.uniform(key, (4, B, 1), images.dtype, -1.0, 1.0)
    dy, dx = shift * draws[0], shift * draws[1]
    angle, zoom = math.radians(rotate) * draws[2], 1.0 + scale * draws[3]
    y, x = (c.reshape(1, -1) for c in jnp.mgrid[:height, :width].astype(images.dtype))
    y, x = y - (height - 1) / 2, x - (width - 1) / 2
    cos, sin = jnp.cos(angle) * zoom, jnp.sin(angle) * zoom
    from_y = cos * y - sin * x + dy + (height - 1) / 2  # [B, height·width]
    from_x = sin * y + cos * x + dx + (width - 1) / 2

    # Linear interpolation as a matrix product: a gather is slow on CPU and TPU alike.
    def weights(place: jax.Array, size: int) -> jax.Array:
        distance = place[..., None] - jnp.arange(size, dtype=images.dtype)[None, None]
        return jnp.maximum(0.0, 1.0 - jnp.abs(distance))

    moved = jnp.einsum("bpy,bpx,byx->bp", weights(from_y, height), weights(from_x, width), images)
    return moved.reshape(images.shape)


def vision_encoder(config: ConfigDict) -> Classifier:
    """Return a small vision transformer: patches, pre-norm blocks, mean pooling."""
    attention = MultiHeadAttention(
        config.num_heads, num_kv_heads=config.num_kv_heads,
        dropout_rate=config.attention_dropout_rate, kernel=config.kernel,
    )  # fmt: skip
    block = EncoderBlock(
        attention, config.mlp_dim, norm=config.norm, activation=config.activation,
        dropout_rate=config.dropout_rate,
    )  # fmt: skip
    return Classifier(
        PatchEmbedding(config.patch_size, config.features), Encoder(config.num_layers, block),
        num_classes=CLASSES, positions=config.positions, dropout_rate=config.dropout_rate,
    )  # fmt: skip


class Digits:
    """The classification of images as one of ten digits: a `Task`."""

    def __init__(self, config: ConfigDict) -> None:
        self.config, self.model = config, vision_encoder(config.model)
        self.train, self.test = load()

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters."""
        image = jnp.zeros((1, *self.train["image"].shape[1:], 1), jnp.float32)
        return self.model.init(key, image, deterministic=True)["params"]

    def batches(self, seed: int, batch_size: int, rows: np.ndarray) -> grain.IterDataset:
        """Return endless shuffled `image` [rows, 8, 8] and `label` [rows]."""
        indices = shuffled(len(self.train["label"]), batch_size, seed)
        return indices.map(lambda i: {name: x[i[rows]] for name, x in self.train.items()})

    def test_batches(self) -> list[Batch]:
        """Return the test split in one batch."""
        return [{**self.test, "weight": np.ones(len(self.test["label"]), np.float32)}]

    def loss(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the cross entropy against smoothed labels, over augmented images."""
        augment_key, dropout_key = jax.random.split(key)
        images = augment(batch["image"], augment_key, **self.config.augment)
        logits = self.apply(params, images, deterministic=False, rngs={"dropout": dropout_key})
        one_hot = jax.nn.one_hot(batch["label"], CLASSES, dtype=logits.dtype)
        targets = optax.smooth_labels(one_hot, self.config.label_smoothing)
        loss = optax.softmax_cross_entropy(logits, targets).mean()
        correct = logits.argmax(-1) == batch["label"]
        return loss, {"accuracy": correct.astype(jnp.float32).mean()}

    def evaluate(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Return the cross entropy and the accuracy on images as they are."""
        logits, weight = self.apply(params, batch["image"]), batch["weight"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        correct = (logits.argmax(-1) == batch["label"]).astype(weight.dtype)
        sums = {"loss": jnp.sum(losses * weight), "accuracy": jnp.sum(correct * weight)}
        return {**sums, "count": weight.sum()}

    def apply(self, params: Params, images: jax.Array, **call: Any) -> Any:
        """Return the logits [B, 10] of images [B, height, width]."""
        call = {"deterministic": True} | call
        return self.model.apply({"params": params}, images[..., None], **call)
