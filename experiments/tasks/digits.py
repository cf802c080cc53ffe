"""Handwritten digits: the 1,797 images of 8×8 pixels that come with scikit-learn."""

import math
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.tasks.task import Batch, Metrics, Params, shuffled
from flax_mha import EncoderBlock, MultiHeadAttention
from flax_mha.models import Classifier, Encoder, PatchEmbedding


def load() -> tuple[Batch, Batch]:
    """Return the training and the test split: `image` float32 [n, 8, 8] in 0 … 1, `label` [n]."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target.astype("i4")
    # A constant seed, so that every run, resumed or new, holds out the same fifth of the images.
    splits = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    image, test_image, label, test_label = splits
    return {"image": image, "label": label}, {"image": test_image, "label": test_label}


def augment(
    images: jax.Array, key: jax.Array, *, shift: float, rotate: float, scale: float
) -> jax.Array:
    """Move images [B, height, width] at random, each a little, with 0 beyond the border.

    Args:
      images: the images.
      key: the randomness.
      shift: the most pixels that an image moves by, along each axis.
      rotate: the most degrees that it turns by, either way.
      scale: the largest relative change of its size.
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


def vision_encoder(m: ConfigDict) -> Classifier:
    """Return the small vision transformer of `config.model`: pre-norm blocks, mean pooling."""
    attention = MultiHeadAttention(
        m.num_heads, num_kv_heads=m.num_kv_heads, dropout_rate=m.attention_dropout_rate,
        kernel=m.kernel,
    )  # fmt: skip
    block = EncoderBlock(
        attention, m.mlp_dim, norm=m.norm, activation=m.activation, dropout_rate=m.dropout_rate
    )
    patches, encoder = PatchEmbedding(m.patch_size, m.features), Encoder(m.num_layers, block)
    return Classifier(
        patches, encoder, num_classes=10, positions=m.positions, dropout_rate=m.dropout_rate
    )


class Digits:
    """The classification of images as one of ten digits: a `Task`."""

    def __init__(self, config: ConfigDict) -> None:
        self.config, self.model = config, vision_encoder(config.model)
        self.train, self.test = load()

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters."""
        image = jnp.zeros((1, *self.train["image"].shape[1:], 1), jnp.float32)
        return self.model.init(key, image, deterministic=True)["params"]

    def data(self) -> list[bytes]:
        """Return the images and labels."""
        return [x.tobytes() for split in (self.train, self.test) for x in split.values()]

    def batches(self, seed: int, batch_size: int, rows: np.ndarray) -> grain.IterDataset:
        """Return endless shuffled `image` [rows, 8, 8] and `label` [rows]."""
        indices = shuffled(len(self.train["label"]), batch_size, seed)
        return indices.map(lambda i: {name: x[i[rows]] for name, x in self.train.items()})

    def test_batches(self) -> list[Batch]:
        """Return the test split in one batch."""
        return [{**self.test, "weight": np.ones(len(self.test["label"]), np.float32)}]

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """Return the cross entropy against smoothed labels, over augmented images."""
        augment_key, dropout_key = jax.random.split(key)
        images = augment(batch["image"], augment_key, **self.config.augment)
        logits = self.apply(params, images, deterministic=False, rngs={"dropout": dropout_key})
        targets = jax.nn.one_hot(batch["label"], 10, dtype=logits.dtype)
        targets = optax.smooth_labels(targets, self.config.label_smoothing)
        loss = optax.softmax_cross_entropy(logits, targets).mean()
        accuracy = (logits.argmax(-1) == batch["label"]).astype(jnp.float32).mean()
        return loss, {"accuracy": accuracy}

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        """Return the cross entropy and the accuracy on images as they are."""
        logits, weight = self.apply(params, batch["image"]), batch["weight"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        correct = (logits.argmax(-1) == batch["label"]).astype(weight.dtype)
        loss, accuracy = jnp.sum(losses * weight), jnp.sum(correct * weight)
        return {"loss": loss, "accuracy": accuracy, "count": weight.sum()}

    def apply(self, params: Params, images: jax.Array, **call: Any) -> Any:
        """Return the logits [B, 10] of images [B, height, width]."""
        call = {"deterministic": True} | call
        return self.model.apply({"params": params}, images[..., None], **call)
