"""Pictures of attention weights. They need Matplotlib, which flax_mha does not install."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flax_mha.taps.sown import find_weights

__all__ = ["heads"]
__dir__ = __all__.copy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 8  # panels side by side
_LABELS = 40  # tokens whose names still fit along a panel


def heads(weights: Any, tokens: Sequence[str] | None = None) -> "Figure":
    """Draw a panel of attention weights for every head, with queries as rows and keys as columns.

    White is 0 and dark blue is 1. `figure.savefig("heads.png")` writes the figure.

    Args:
      weights: the weights [*B, N, T, S] of one example (every B = 1), or a tree of them, such as
        all `intermediates`.
      tokens: names of the tokens. Queries or keys of another number have no names.

    Raises:
      ValueError: if there are no weights, they are of several examples, or names do not fit.
      ImportError: if Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need Matplotlib; pip install matplotlib") from error
    layers = find_weights(weights)
    panels = [(layer, i, head) for layer, each in layers.items() for i, head in enumerate(each)]
    columns = min(_COLUMNS, max(len(each) for each in layers.values()))
    rows = -(-len(panels) // columns)
    size = 3.2 if tokens is not None else 2.2
    figure: Any = Figure(figsize=(size * columns, size * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (layer, i, head) in zip(axes, panels, strict=False):
        axis.imshow(head, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        title = f"{layer}, head {i}" if layer else f"head {i}"
        axis.set_title(title, fontsize=9, parse_math=False)
        if tokens is not None and len(tokens) not in head.shape:
            raise ValueError(
                f"tokens must name the {head.shape[0]} queries or {head.shape[1]} keys, got "
                f"{len(tokens)} names"
            )
        for set_ticks, count in zip((axis.set_yticks, axis.set_xticks), head.shape, strict=True):
            set_ticks([])
            if tokens is not None and len(tokens) == count <= _LABELS:
                set_ticks(range(count), tokens, parse_math=False)  # Dollars are no mathematics.
    for axis in axes[len(panels) :]:
        axis.set_axis_off()

    def as_png() -> bytes:
        figure.savefig(buffer := io.BytesIO(), format="png")
        return buffer.getvalue()

    figure._repr_png_ = as_png  # Shows it in a notebook that never used pyplot.
    return figure
