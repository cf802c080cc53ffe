"""Pictures of attention weights. They need Matplotlib, which flax_mha does not install."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flax_mha.taps.sown import find_weights

__all__ = ["class_token", "heads"]
__dir__ = __all__.copy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 8  # panels side by side
_LABELS = 40  # tokens whose names still fit along a panel


def heads(weights: Any, tokens: Sequence[str] | None = None) -> "Figure":
    """Draw a panel of attention weights for every head, with queries as rows and keys as columns.

    White is 0, and the darkest blue the largest weight of a panel, which stands above it.

    Args:
      weights: the weights [*B, N, T, S] of one example (every B = 1), or a tree such as all
        `intermediates`.
      tokens: names of the tokens. Queries or keys of another number have no names.

    Raises:
      ValueError: if there are no weights, or they are of several examples.
    """
    figure, panels = _panels(weights, 3.2 if tokens is not None else 2.2)
    for axis, title, head in panels:
        axis.imshow(head, cmap="Blues", vmin=0, aspect="auto")
        axis.set_title(f"{title}, up to {head.max():.2g}", fontsize=9, parse_math=False)
        for set_ticks, count in zip((axis.set_yticks, axis.set_xticks), head.shape, strict=True):
            set_ticks([])
            if tokens is not None and len(tokens) == count <= _LABELS:
                set_ticks(range(count), tokens, parse_math=False)  # Dollars are no mathematics.
    return figure


def class_token(weights: Any, image: Any) -> "Figure":
    """Draw over an image how much the class token of each head attends to each patch.

    Args:
      weights: as in `heads`. The first token is the class token, the last ones are the patches,
        row by row.
      image: the image [height, width] or [height, width, 3].

    Raises:
      ValueError: if there are no weights, or the patches do not form a grid like the image.
    """
    height, width = image.shape[:2]
    figure, panels = _panels(weights, 2.2)
    for axis, title, head in panels:
        side = round(((head.shape[1] - 1) * height / width) ** 0.5)
        columns = round(side * width / height)
        if not 0 < side * columns < head.shape[1]:
            raise ValueError(
                f"the keys must be a class token and a grid of patches, got {head.shape[1]} keys "
                f"for an image of {height}×{width}"
            )
        patches = head[0, -side * columns :].reshape(side, columns)
        largest, extent = float(patches.max()), (0, width, height, 0)
        axis.imshow(image, cmap="gray", extent=extent)
        # A masked class token attends to nothing.
        axis.imshow(patches, cmap="Reds", vmin=0, extent=extent, alpha=patches / (largest or 1.0))
        axis.set_title(f"{title}, up to {largest:.2g}", fontsize=9, parse_math=False)
        axis.set(xticks=[], yticks=[])
    return figure


def _panels(weights: Any, size: float) -> tuple["Figure", list[tuple[Any, str, Any]]]:
    """Return a figure, and for each head its axes, its title and its weights [T, S]."""
    from matplotlib.figure import Figure

    layers = find_weights(weights)
    panels = [
        (f"{layer}, head {i}".removeprefix(", "), head)
        for layer, each in layers.items()
        for i, head in enumerate(each)
    ]
    columns = min(_COLUMNS, max(len(each) for each in layers.values()))
    rows = -(-len(panels) // columns)
    figure: Any = Figure(figsize=(size * columns, size * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()

    def as_png() -> bytes:
        figure.savefig(buffer := io.BytesIO(), format="png")
        return buffer.getvalue()

    figure._repr_png_ = as_png  # Shows it in a notebook that never used pyplot.
    return figure, [(axis, *panel) for axis, panel in zip(axes, panels, strict=False)]
