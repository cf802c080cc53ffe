"""Pictures of a run, drawn without a display."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

COLORS = {"train": "tab:blue", "test": "tab:orange"}


def curves(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Every metric of the test rows over the steps, beside the same of the training rows.

    Several seeds are thin lines around their mean.
    """
    names = sorted({n for row in rows if row["split"] == "test" for n in row} - {"step", "split"})
    figure = Figure(figsize=(5.5 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for split, color in COLORS.items():
            drawn = [row for row in rows if row["split"] == split and name in row]
            if not drawn:
                continue  # Some are measured on test data alone.
            steps = [row["step"] for row in drawn]
            values = np.asarray([np.atleast_1d(row[name]) for row in drawn])
            if values.shape[-1] > 1:
                axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.5)
            axes.plot(
                steps, values.mean(-1), color=color, label=split,
                marker="o" if split == "test" else None,
            )  # fmt: skip
        axes.set(xlabel="step", ylabel=name)
        if name == "loss":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def attention(path: Path, images: np.ndarray, weights: np.ndarray, titles: Sequence[str]) -> None:
    """Each head's attention over each image: a row for a layer, a column for a head.

    Args:
      path: of the PNG.
      images: [n, height, width].
      weights: [n, layers, heads, T, T] over patches row by row; each head is shown as the weight
        that a patch gets, averaged over the queries.
      titles: n of them.
    """
    n, layers, heads, T, _ = weights.shape
    height, width = images.shape[1:]
    side = round((T * height / width) ** 0.5)
    # A patch's share, in multiples of an even spread.
    received = T * weights.mean(-2).reshape(n * layers, heads, side, T // side)
    norm = Normalize(0.0, received.max())
    rows, columns = n * layers, heads + 1
    figure = Figure(figsize=(columns + 1.4, rows + 0.3))
    # By hand: so many axes take the automatic layout seconds.
    edges = {"left": 0.04, "right": 0.93, "bottom": 0.01, "top": 0.96}
    grid = figure.subplots(
        rows, columns, squeeze=False, gridspec_kw={"wspace": 0.08, "hspace": 0.08, **edges}
    )
    extent = (0.0, float(width), float(height), 0.0)
    for row in range(rows):
        image, title = images[row // layers], titles[row // layers]
        first, *others = grid[row]
        first.imshow(image, cmap="gray_r", extent=extent)
        first.set_ylabel(f"{title}\nlayer {row % layers}", fontsize=9)
        for axes, one in zip(others, received[row], strict=True):
            # The digit in light grey, so that strong attention shows through on ink and paper.
            axes.imshow(image, cmap="gray_r", extent=extent, vmax=2 * image.max())
            axes.imshow(one, cmap="Reds", norm=norm, extent=extent, alpha=0.85 * norm(one) ** 0.5)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    for axes, title in zip(grid[0], ["image", *(f"head {i}" for i in range(heads))], strict=True):
        axes.set_title(title, fontsize=9)
    bar = figure.colorbar(ScalarMappable(norm, "Reds"), figure.add_axes((0.945, 0.2, 0.012, 0.6)))
    bar.set_label("attention a patch receives (1: an even spread)", fontsize=9)
    figure.savefig(path, dpi=110)


def alignment(
    path: Path, sources: Sequence[str], targets: Sequence[str], weights: np.ndarray
) -> None:
    """How much each character of a target looks at each of its source's, a panel for each pair.

    Characters that the font lacks are shown by their code point.

    Args:
      path: of the PNG.
      sources: n strings.
      targets: n strings.
      weights: [n, T, S]; row t is that of the query which gives character t.
    """
    rows = -(-len(sources) // 2)
    figure = Figure(figsize=(15, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False).flat
    for axes in panels[len(sources) :]:
        axes.set_axis_off()
    for axes, source, target, each in zip(panels, sources, targets, weights, strict=False):
        image = axes.imshow(
            each[: len(target), : len(source)], cmap="Reds", vmin=0, vmax=1, aspect="auto"
        )
        axes.set_xticks(range(len(source)), map(_readable, source))
        axes.set_yticks(range(len(target)), map(_readable, target))
        axes.set_title(f"read as {target}" if target else "read as nothing", fontsize=9)
        figure.colorbar(image, ax=axes, label="weight")
    figure.savefig(path, dpi=110)


def _readable(character: str) -> str:
    """A character as a label."""
    if character.isspace():
        return "␣"
    font = get_font(findfont(FontProperties()))
    drawn = character.isprintable() and font.get_char_index(ord(character))
    return character if drawn else "\n".join(re.findall("..?", f"{ord(character):04X}"))


def by_place(path: Path, bits: np.ndarray) -> None:
    """Bits per byte over how many bytes the model saw before.

    Args:
      path: of the PNG.
      bits: [T], NaN where nothing was predicted.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(len(bits)), bits, color=COLORS["test"])
    axes.set(xlabel="bytes before in the window", ylabel="bits per byte, held-out text")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
