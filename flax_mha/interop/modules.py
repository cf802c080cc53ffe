"""Classification heads, as of `…ForSequenceClassification`."""

from typing import Any

import flax.linen as nn
import jax

from flax_mha.interop.settings import Config
from flax_mha.interop.table import Family, linear
from flax_mha.layer.linear import Projection
from flax_mha.models import Classifier
from flax_mha.models.feed_forward import Activation

_HEADED = ("ForSequenceClassification", "ForImageClassification")


class Classified(nn.Module):
    """A classifier: the first token's features, a dense layer, and an output layer.

    Attributes:
      body: the module of the features [*B, T, D].
      num_classes: the number of classes.
      activation: the dense layer's activation.
    """

    body: nn.Module
    num_classes: int
    activation: Activation

    @nn.compact
    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        """Return the logits [*B, num_classes] for arguments of the body."""
        first = self.body(*args, **options)[..., 0, :]
        dense = Projection(first.shape[-1:], ("embed", None), rows=("batch",), name="dense")
        x = self.activation(dense(first))
        return Projection((self.num_classes,), ("embed", None), rows=("batch",), name="head")(x)


def classified(
    config: Config, family: Family, dense: str = "", head: str = "classifier",
    activation: Activation = nn.tanh,
) -> Family:  # fmt: skip
    """Return a family with its classification head, if the config's `architectures` have one.

    Args:
      config: the model's config, whose `id2label` gives the number of classes.
      family: the family without a head.
      dense: the name of the dense layer before the output layer; empty for images.
      head: the name of the output layer.
      activation: the activation between the two layers.
    """
    architectures = config.get("architectures") or ()
    if not any(str(name).endswith(_HEADED) for name in architectures):
        return family
    count = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    body, prefix = family.module, ""
    module: nn.Module
    if isinstance(body, Classifier):
        module = body.clone(num_classes=count, pooling="first")
    else:
        module, prefix = Classified(body, count, activation), "body/"
    rows = []
    for row in family.rows:
        ours = tuple(prefix + path for path in row.paths)
        rows.append(row._replace(theirs=family.prefix + row.theirs, ours=ours))
    rows += linear(dense, "dense") if dense else []
    return family._replace(module=module, rows=rows + linear(head, "head"))
