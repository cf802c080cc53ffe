"""Pictures of attention weights. They need matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flax_mha.base import checks
from flax_mha.base.coordinates import Array


def heads(
    weights: Array | Mapping[str, Array], tokens: Sequence[str] = (), *, columns: int = 4
) -> Any:
    """Draw the attention weights of each head: a line is a query, a column a key.

    >>> out, weights = layer.apply(variables, x, return_weights=True)
    >>> figure = heads(weights[0], tokens)

    Args:
      weights: [N, T, S], those of one row of the batch, or several such arrays by name.
      tokens: labels of the keys, and of the queries if there are as many.
      columns: the maximum number of pictures side by side.

    Returns:
      A figure of matplotlib, to show or to save.

    Raises:
      ValueError, TypeError: if an argument does not fit.
    """
    from matplotlib import pyplot  # Only pictures need it.

    checks.positive(columns=columns)
    tables = {}
    for name, array in (weights if isinstance(weights, Mapping) else {"": weights}).items():
        if np.ndim(array) != 3 or len(tokens) not in (0, np.shape(array)[2]):
            raise ValueError(
                f"weights must have shape [N, T, S] with S = {len(tokens) or 'any'} tokens, got "
                f"{np.shape(array)}; choose one row of the batch, as in weights[0]"
            )
        for head, table in enumerate(np.asarray(array, float)):
            tables[f"{name} head {head}".strip()] = table
    columns = min(columns, len(tables))
    lines = -(-len(tables) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(3.3 * columns, 3.6 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(tables) :]:
        axis.set_axis_off()
    for axis, (title, table) in zip(axes.flat, tables.items(), strict=False):
        axis.imshow(table, cmap="Blues", vmin=0, vmax=1)
        axis.set(title=title, xlabel="key", ylabel="query")
        axis.set_xticks(range(len(tokens)), tokens)
        labels = tokens if len(tokens) == len(table) else ()
        axis.set_yticks(range(len(labels)), labels)
    return figure
