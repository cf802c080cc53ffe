"""Heads that give one vector of logits for a row: `…ForSequenceClassification` and the like."""

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
    """Logits [*B, num_classes]: the first token's features, a dense layer, and a linear one.

    Attributes:
      body: gives features [*B, T, D].
      num_classes: how many.
      activation: of the dense layer.
    """

    body: nn.Module
    num_classes: int
    activation: Activation

    @nn.compact
    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        """Return the logits; arguments are those of the body."""
        first = self.body(*args, **options)[..., 0, :]
        dense = Projection(first.shape[-1:], ("embed", None), rows=("batch",), name="dense")
        x = self.activation(dense(first))
        return Projection((self.num_classes,), ("embed", None), rows=("batch",), name="head")(x)


def classified(
    config: Config, family: Family, dense: str = "", head: str = "classifier",
    by: Activation = nn.tanh,
) -> Family:  # fmt: skip
    """Return the family with its head, if the config's `architectures` name one that classifies.

    Args:
      config: whose `id2label` says how many classes there are.
      family: without a head.
      dense: the name of the tensors of the layer before the last; none for images.
      head: of those of the last.
      by: the activation between them.
    """
    named = config.get("architectures") or ()
    if not any(str(name).endswith(_HEADED) for name in named):
        return family
    count = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    body, inside = family.module, ""
    module: nn.Module
    if isinstance(body, Classifier):
        module = body.clone(num_classes=count, pooling="first")
    else:
        module, inside = Classified(body, count, by), "body/"
    rows = [
        row._replace(
            theirs=family.prefix + row.theirs, ours=tuple(inside + path for path in row.paths)
        )
        for row in family.rows
    ]
    rows += linear(dense, "dense") if dense else []
    return family._replace(module=module, rows=rows + linear(head, "head"))
