"""Classification heads: `…ForSequenceClassification` and `…ForImageClassification`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha.interop.checked_config import Config
from flax_mha.interop.table import Family, linear
from flax_mha.layer.linear import Projection, default_bias_init
from flax_mha.models import Classifier
from flax_mha.models.feed_forward import Activation
from flax_mha.models.models import mean

_HEADED = ("ForSequenceClassification", "ForImageClassification")


class Classified(nn.Module):
    """A classifier: pooled features, a dense layer, a norm, and an output layer.

    Attributes:
      body: the module of the features [*B, T, D].
      num_classes: the number of classes.
      activation: the dense layer's activation.
      use_bias: True for a bias of the dense layer.
      norm: the norm after the activation, or None.
      pooling: "first" token's features, or "mean" over all tokens.
    """

    body: nn.Module
    num_classes: int
    activation: Activation
    use_bias: bool = True
    norm: nn.Module | None = None
    pooling: str = "first"

    @nn.compact
    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        """Return the logits [*B, num_classes] for arguments of the body."""
        x, real = self.body(*args, **options), options.get("attention_mask")
        if self.pooling == "first":
            x = x[..., 0, :]
        elif real is None:
            x = mean(x, options.get("lengths"))
        else:
            x = jnp.mean(x, -2, where=jnp.asarray(real)[..., None] != 0)
        bias = default_bias_init if self.use_bias else None
        x = Projection(
            x.shape[-1:], ("embed", None), rows=("batch",), bias_init=bias, name="dense"
        )(x)
        x = self.activation(x)
        x = x if self.norm is None else self.norm(x)
        return Projection((self.num_classes,), ("embed", None), rows=("batch",), name="head")(x)


def classified(
    config: Config,
    family: Family,
    dense: str = "",
    head: str = "classifier",
    activation: Activation = nn.tanh,
    **fields: Any,
) -> Family:
    """Return a family with its classification head, if the config's `architectures` have one.

    `dense` (empty for images) and `head` are names of layers, and `fields` the classifier's.
    """
    architectures = config.get("architectures") or ()
    if not any(str(name).endswith(_HEADED) for name in architectures):
        return family
    count = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    body, prefix = family.module, ""
    module: nn.Module
    if isinstance(body, Classifier):
        module = body.clone(num_classes=count, **{"pooling": "first"} | fields)
    else:
        module, prefix = Classified(body, count, activation, **fields), "body/"
    rows = [
        row._replace(
            theirs=family.prefix + row.theirs, ours=tuple(prefix + path for path in row.paths)
        )
        for row in family.rows
    ]
    rows += linear(dense, "dense") if dense else []
    return family._replace(module=module, rows=rows + linear(head, "head"))
