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


def heads(
    weights: Any, tokens: Sequence[str] | None = None, kv_tokens: Sequence[str] | None = None
) -> "Figure":
    """Draw a panel of attention weights for every head, with queries as rows and keys as columns.

    White is 0 and dark blue is 1. `figure.savefig("heads.png")` writes the figure.

    Args:
      weights: the weights [*B, N, T, S] of one example (every B = 1), or a tree of them, such as
        all `intermediates`.
      tokens: T names of the queries, and of the keys if `kv_tokens` is None and S = T.
      kv_tokens: S names of the keys.

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
        keys = tokens if kv_tokens is None and head.shape[0] == head.shape[1] else kv_tokens
        _name_tokens(axis.set_yticks, tokens, head.shape[0], "tokens", "queries")
        _name_tokens(axis.set_xticks, keys, head.shape[1], "kv_tokens", "keys")
    for axis in axes[len(panels) :]:
        axis.set_axis_off()

    def as_png() -> bytes:
        figure.savefig(buffer := io.BytesIO(), format="png")
        return buffer.getvalue()

    figure._repr_png_ = as_png  # Shows it in a notebook that never used pyplot.
    return figure


def _name_tokens(
    set_ticks: Any, names: Sequence[str] | None, count: int, argument: str, role: str
) -> None:
    """Set the ticks of an axis to its tokens' names, or to none."""
    if names is not None and len(names) != count:
        raise ValueError(f"{argument} must name the {count} {role}, got {len(names)} names")
    if names is None or count > _LABELS:
        set_ticks([])
    else:
        set_ticks(range(count), names, parse_math=False)  # Text, not mathematics between dollars.
