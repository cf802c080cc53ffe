"""Handwritten digits: the 1,797 images of 8×8 pixels that scikit-learn brings along."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments import plots
from experiments.tasks.task import Batch, Params, measured, shuffled
from flax_mha import EncoderBlock, MultiHeadAttention
from flax_mha.models import Classifier, Encoder, PatchEmbedding

CLASSES = 10
TEST_SHARE = 0.2
SPLIT_SEED = 0  # A constant, so that every run, resumed or new, holds out the same images.
DRAWN = 4  # test images in the picture of the attention

Split = dict[str, np.ndarray]


def load() -> tuple[Split, Split]:
    """The training and the test split, each `image` float32 [n, 8, 8] in 0 … 1 and `label` [n].

    The test split is a fifth of the images, drawn once and for all, each digit in proportion.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=TEST_SHARE, random_state=SPLIT_SEED, stratify=labels
    )
    return (
        {"image": images[train], "label": labels[train]},
        {"image": images[test], "label": labels[test]},
    )


def augment(
    images: jax.Array, key: jax.Array, *, shift: float, rotate: float, scale: float
) -> jax.Array:
    """Moves each image a little, in a way that leaves a digit the same digit.

    Args:
      images: [B, height, width].
      key: what the draws are a pure function of.
      shift: the most pixels it moves by, along each axis.
      rotate: the most degrees it turns by, either way.
      scale: the largest relative change of its size.

    Returns:
      [B, height, width], interpolated linearly, 0 beyond the border.
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
    weights_y = _tent(from_y[..., None] - jnp.arange(height, dtype=images.dtype)[None, None])
    weights_x = _tent(from_x[..., None] - jnp.arange(width, dtype=images.dtype)[None, None])
    moved = jnp.einsum("bpy,bpx,byx->bp", weights_y, weights_x, images)
    return moved.reshape(images.shape)


def vision_encoder(config: ConfigDict) -> Classifier:
    """A small vision transformer: patches, learned positions, pre-norm blocks, mean pooling."""
    attention = MultiHeadAttention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        dropout_rate=config.attention_dropout_rate,
        kernel=config.kernel,
    )
    block = EncoderBlock(
        attention,
        config.mlp_dim,
        norm=config.norm,
        activation=config.activation,
        dropout_rate=config.dropout_rate,
    )
    return Classifier(
        PatchEmbedding(config.patch_size, config.features),
        Encoder(config.num_layers, block),
        num_classes=CLASSES,
        positions=config.positions,
        dropout_rate=config.dropout_rate,
    )


class Digits:
    """Which of ten digits an image shows: a `Task`."""

    def __init__(self, config: ConfigDict) -> None:
        self.config = config
        self.training = measured(config, "images moved" if any(config.augment.values()) else "")
        self.objective = "training loss: of smoothed labels" if config.label_smoothing else ""
        self.train, self.test = load()
        self.model = vision_encoder(config.model)

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters."""
        image = jnp.zeros((1, *self.train["image"].shape[1:]), jnp.float32)
        return self.model.init(key, image[..., None], deterministic=True)["params"]

    def batches(self, seed: int, batch_size: int, rows: np.ndarray) -> grain.IterDataset:
        """Endless shuffled `image` [rows, 8, 8] and `label` [rows]."""
        indices = shuffled(len(self.train["label"]), batch_size, seed)
        return indices.map(lambda i: {name: x[i[rows]] for name, x in self.train.items()})

    def test_batches(self) -> list[Batch]:
        """The test split in one batch."""
        weight = np.ones(len(self.test["label"]), np.float32)
        return [{**self.test, "weight": weight}]

    def loss(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross entropy against smoothed labels, over augmented images."""
        augment_key, dropout_key = jax.random.split(key)
        images = augment(batch["image"], augment_key, **self.config.augment)
        logits = self._apply(params, images, deterministic=False, rngs={"dropout": dropout_key})
        one_hot = jax.nn.one_hot(batch["label"], CLASSES, dtype=logits.dtype)
        targets = optax.smooth_labels(one_hot, self.config.label_smoothing)
        loss = optax.softmax_cross_entropy(logits, targets).mean()
        correct = logits.argmax(-1) == batch["label"]
        return loss, {"accuracy": correct.astype(jnp.float32).mean()}

    def evaluate(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Cross entropy and accuracy of the images as they are."""
        logits = self._apply(params, batch["image"])
        weight, label = batch["weight"], batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        correct = (logits.argmax(-1) == label).astype(weight.dtype)
        return {
            "loss": jnp.sum(losses * weight),
            "accuracy": jnp.sum(correct * weight),
            "count": weight.sum(),
        }

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """The test accuracy, with the standard deviation over the seeds if there are several."""
        accuracy = metrics["accuracy"]
        spread = f" ± {self.score(accuracy.std(ddof=1))}" if accuracy.size > 1 else ""
        return f"test accuracy {self.score(accuracy.mean())}{spread}"

    def score(self, value: float) -> str:
        """A share in percent."""
        return f"{value:.1%}"

    def fingerprint(self) -> str:
        """The SHA-256 of images and labels."""
        arrays = [x for split in (self.train, self.test) for x in split.values()]
        return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()

    def baselines(self) -> dict[str, float]:
        """Two classics on the raw pixels of the same split."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.svm import SVC
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        models: dict[str, Any] = {
            "logistic regression": LogisticRegression(max_iter=1000),
            "RBF SVM": SVC(kernel="rbf"),
        }
        (x, y), (test_x, test_y) = (
            (split["image"].reshape(len(split["image"]), -1), split["label"])
            for split in (self.train, self.test)
        )
        # Products this small take a hundred times longer when two threads wait for each other.
        with threadpool_limits(1):
            return {name: float(m.fit(x, y).score(test_x, test_y)) for name, m in models.items()}

    def draw(self, params: Params, workdir: Path) -> None:
        """`attention.png`: how much each head looks at each patch of some test images."""
        # One image of each of the first digits: more can be told from different shapes.
        first = [int(np.flatnonzero(self.test["label"] == digit)[0]) for digit in range(DRAWN)]
        images = self.test["image"][np.asarray(first)]

        @jax.jit
        def observe(params: Params, images: jax.Array) -> tuple[jax.Array, Any]:
            return self._apply(params, images, sow_weights=True, mutable=["intermediates"])

        logits, state = jax.device_get(observe(params, images))
        layers = state["intermediates"]["encoder"]
        # [images, layers, heads, queries, keys]
        weights = np.stack(
            [
                layers[f"layers_{i}"]["attention"]["attention_weights"][0]
                for i in range(len(layers))
            ],
            axis=1,
        )
        plots.attention(
            workdir / "attention.png", images, weights,
            titles=[
                f"{label} read as {guess}"
                for label, guess in zip(self.test["label"][first], logits.argmax(-1), strict=True)
            ],
        )  # fmt: skip

    def _apply(self, params: Params, images: jax.Array, **call: Any) -> Any:
        call = {"deterministic": True} | call
        return self.model.apply({"params": params}, images[..., None], **call)


def _tent(distance: jax.Array) -> jax.Array:
    """Linear interpolation's weight of a pixel at that distance."""
    return jnp.maximum(0.0, 1.0 - jnp.abs(distance))
