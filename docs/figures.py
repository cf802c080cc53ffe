"""Draw README.md's picture from the first table of performance.md: `python docs/figures.py`."""

import re
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
LIBRARIES = {
    "ours": "flax_mha",
    "linen": "Flax linen",
    "nnx": "Flax nnx",
    "Equinox": "Equinox",
    "PyTorch": "PyTorch",
}
COLORS = ["#b2182b", "#4d4d4d", "#878787", "#bababa", "#92c5de"]


def read_times() -> dict[str, dict[str, float]]:
    """Return the milliseconds of a layer with gradients, by number of tokens and library."""
    page = (DOCS / "performance.md").read_text()
    table = page[page.index("| pass |") :].split("\n\n")[0]
    header, _, *rows = [
        [cell.strip() for cell in re.split(r"\|", line)[1:-1]] for line in table.splitlines()
    ]
    start = next(n for n, row in enumerate(rows) if row[0] == "with gradients")
    return {
        row[1].split()[0]: {
            name: float(ms.replace(",", "")) for name, ms in zip(header[2:], row[2:], strict=True)
        }
        for row in rows[start:]
    }


def main() -> None:
    """Write `_static/performance.png`."""
    times = read_times()
    fig, axes = plt.subplots(1, len(times), figsize=(8, 2.4), layout="constrained", sharey=True)
    for ax, (tokens, row) in zip(axes, times.items(), strict=True):
        names = list(LIBRARIES)[::-1]
        speeds = [row["linen"] / row[name] for name in names]
        bars = ax.barh([LIBRARIES[name] for name in names], speeds, color=COLORS[::-1])
        ax.bar_label(bars, [f"{speed:.1f}×" for speed in speeds], padding=3)
        ax.set(title=f"{tokens} tokens", xlim=(0, max(speeds) * 1.25), xticks=[])
        ax.spines[:].set_visible(False)
        ax.tick_params(left=False)
    fig.savefig(DOCS / "_static" / "performance.png", dpi=150)


if __name__ == "__main__":
    main()
