"""Pictures of a run, drawn without a display."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import (
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
    StrMethodFormatter,
)

COLORS = {"train": "tab:blue", "test": "tab:orange"}
SHARES = ("accuracy", "exact", "exact_unseen")  # metrics from 0 to 1


def curves(path: Path, rows: Sequence[dict[str, Any]], training: str, objective: str) -> None:
    """Draw every metric of the test rows over the steps, beside the same of the training rows.

    Several seeds are thin lines around their mean.

    Args:
      path: the path of the PNG.
      rows: the rows of the log.
      training: a legend that tells how the metrics of the training rows were measured.
      objective: the name of the training loss, which then gets a panel of its own, if the test loss
        is another quantity; or else "".
    """
    tested = sorted({n for row in rows if row["split"] == "test" for n in row} - {"step", "split"})
    panels = [(name, name, tuple(COLORS)) for name in tested]
    if objective:
        at = tested.index("loss")
        panels[at : at + 1] = [("loss", "loss", ("test",)), ("loss", objective, ("train",))]
    labels = {"train": training, "test": "test"}
    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, title, splits) in zip(grid, panels, strict=True):
        for split in splits:
            drawn = [row for row in rows if row["split"] == split and name in row]
            if drawn:  # Some are measured on test data alone.
                _curve(axes, drawn, name, COLORS[split], labels[split])
        axes.set(xlabel="step", ylabel=title)
        axes.set_xlim(0, 1.05 * max(row["step"] for row in rows))
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        if name in SHARES:
            axes.set_ylim(-0.02, 1.02)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        elif name == "loss":
            axes.set_yscale("log")
            widen(axes)
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    save(figure, path, 120)


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Write a picture, in place of one that may be there."""
    figure.savefig(path, dpi=dpi, format="png")


def _curve(axes: Axes, rows: Sequence[dict[str, Any]], name: str, color: str, label: str) -> None:
    steps = [row["step"] for row in rows]
    # None, where a value is not finite, leaves a gap.
    values = np.asarray([np.atleast_1d(np.asarray(row[name], float)) for row in rows])
    if values.shape[-1] > 1:
        axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.5)
    marked = label == "test" or len(rows) < 3  # A line needs two points to be seen.
    axes.plot(steps, values.mean(-1), color=color, label=label, marker="o" if marked else None)


def widen(axes: Axes) -> None:
    """Widen a logarithmic y axis to a factor of 4, so that small differences look small."""
    low, high = axes.get_ylim()
    spare = max(0.0, np.log(4 / (high / low))) / 2
    axes.set_ylim(low * np.exp(-spare), high * np.exp(spare))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def attention(path: Path, images: np.ndarray, weights: np.ndarray, titles: Sequence[str]) -> None:
    """Draw each head's attention over each image: a row for a layer, a column for a head.

    Args:
      path: the path of the PNG.
      images: the images [n, height, width].
      weights: the weights [n, layers, heads, T, T] over patches row by row; each head is shown as
        the weight that a patch gets, averaged over the queries.
      titles: the titles of the n images.
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
        first.set_ylabel(f"{title}\nlayer {row % layers}", fontsize=9, parse_math=False)
        for axes, one in zip(others, received[row], strict=True):
            # The digit in light grey, so that strong attention shows through on ink and paper.
            axes.imshow(image, cmap="gray_r", extent=extent, vmax=2 * image.max())
            axes.imshow(one, cmap="Reds", norm=norm, extent=extent, alpha=_opacity(norm(one)))
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    for axes, title in zip(grid[0], ["image", *(f"head {i}" for i in range(heads))], strict=True):
        axes.set_title(title, fontsize=9)
    # The bar on white paper, as faint as what is drawn.
    reds = colormaps["Reds"](np.linspace(0, 1, 256))[:, :3]
    shown = ListedColormap(1 + _opacity(np.linspace(0, 1, 256))[:, None] * (reds - 1))
    bar = figure.colorbar(ScalarMappable(norm, shown), figure.add_axes((0.945, 0.2, 0.012, 0.6)))
    bar.set_label("weight of a patch, mean over all queries (1: an even spread)", fontsize=9)
    save(figure, path, 110)


def _opacity(share: np.ndarray) -> np.ndarray:
    return 0.85 * share**0.5


def alignment(
    path: Path, sources: Sequence[str], found: Sequence[str], true: Sequence[str],
    weights: np.ndarray, weighed: str,
) -> None:  # fmt: skip
    """Draw the weights of each output's characters over their source, a panel for each pair.

    Characters that the font lacks are shown by their code points, see `drawable`.

    Args:
      path: the path of the PNG.
      sources: the n sources.
      found: the n outputs.
      true: the n correct outputs.
      weights: the weights [n, T, S]; row t belongs to the query which gives character t.
      weighed: the label of the weights' colors.
    """
    rows = -(-len(sources) // 2)
    figure = Figure(figsize=(15, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False).flat
    shades = ScalarMappable(Normalize(0.0, 1.0), "Reds")
    figure.colorbar(shades, ax=panels[:], label=weighed, shrink=0.6, aspect=40, pad=0.01)
    for axes in panels[len(sources) :]:
        axes.set_axis_off()
    for axes, source, output, target, each in zip(
        panels, sources, found, true, weights, strict=False
    ):
        labels = [*map(_tick, output)] or ["end"]  # Then the first query gives the end.
        axes.imshow(
            each[: len(labels), : len(source)], cmap=shades.cmap, norm=shades.norm, aspect="auto"
        )
        axes.set_xticks(range(len(source)), map(_tick, source), parse_math=False)
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
        axes.set(xlabel="character of the source", ylabel="character of the output")
        verdict = "right" if output == target else f"wrong, true is {readable(target)}"
        title = f"read as {readable(output) or 'nothing'}: {verdict}"
        axes.set_title(title, fontsize=10, parse_math=False)
    save(figure, path, 110)


def drawable(text: str) -> bool:
    """Return True if the font has all characters of a text."""
    font = get_font(findfont(FontProperties()))
    return all(c.isspace() or (c.isprintable() and font.get_char_index(ord(c)) > 0) for c in text)


def readable(text: str) -> str:
    """Return a text with code points in the place of characters that the font lacks."""
    return "".join(c if drawable(c) else f"<U+{ord(c):04X}>" for c in text)


def _tick(character: str) -> str:
    if character.isspace():
        return "␣"
    return character if drawable(character) else f"U+\n{ord(character):04X}"


def by_distance(path: Path, weights: np.ndarray) -> None:
    """Draw the weight of each distance: a panel for each layer, a line for each head.

    Args:
      path: the path of the PNG.
      weights: the weights [layers, heads, T, T]; shown is the mean weight of the keys at each
        distance, over the queries that have one there.
    """
    T = weights.shape[-1]
    distances = np.arange(1 - T, T)
    figure = Figure(figsize=(9, 2.6 * len(weights) + 0.6), layout="constrained")
    grid = figure.subplots(len(weights), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for i, axes in enumerate(grid):
        for number, head in enumerate(weights[i]):
            means = [np.diagonal(head, d).mean() for d in distances]
            axes.plot(distances, means, linewidth=0.8, label=f"head {number}")
        axes.axhline(1 / T, color="black", linestyle=":", linewidth=0.8, label="an even spread")
        axes.set(xscale="symlog", yscale="log", ylim=(1e-5, 1), ylabel=f"layer {i}\nmean weight")
        axes.grid(alpha=0.3)
    grid[0].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    grid[-1].set_xlabel("bytes from the query to the key (negative: before it)")
    save(figure, path, 110)


def by_place(path: Path, bits: np.ndarray) -> None:
    """Draw bits per byte over the number of tokens that the model saw before.

    Args:
      path: the path of the PNG.
      bits: the bits per byte [T], NaN where nothing was predicted.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(len(bits)), bits, color=COLORS["test"])
    axes.set(xlabel="tokens before in the window", ylabel="bits per byte, held-out text")
    axes.grid(alpha=0.3)
    save(figure, path, 120)
