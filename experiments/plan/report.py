"""A plan as tables on the terminal, and as JSON."""

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from experiments.plan import collectives
from experiments.plan.remedies import Remedy
from experiments.plan.roofline import network
from experiments.plan.search import Layout

Row = dict[str, Any]


def console() -> Console:
    """Return a console as wide as the terminal, or wide enough for all tables without one."""
    found = Console()
    return found if found.is_terminal else Console(width=140)


def compiler(device: jax.Device) -> str:
    """Return the compiler of a device and its version, because memory differs between them."""
    package = {"tpu": "libtpu", "gpu": "jax-cuda13-pjrt"}.get(device.platform, "jaxlib")
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:  # A plugin for another CUDA version.
        return f"jaxlib {importlib.metadata.version('jaxlib')}"


def row(layout: Layout) -> Row:
    """Return a layout as JSON values: bytes and operations per device, seconds per step."""
    found, times = layout.found, layout.times
    numbers: Row = {"mesh": layout.sizes, "reason": layout.reason}
    if found is None:
        return numbers
    links = network(found.devices)
    sent = [
        {
            "kind": one.kind, "times": one.times, "devices": one.groups.shape[1],
            "bytes": one.bytes, "sent": one.sent, "seconds": links and links.seconds(one),
        }
        for one in found.sent
    ]  # fmt: skip
    return numbers | {
        "bytes": found.memory._asdict() | {"chip": links and links.memory},
        "flops": found.flops,
        "moved": found.moved,
        "collectives": sent,
        "seconds": times and times._asdict() | {"step": times.step, "binds": times.binds},
        "links": {
            link: {"sent": size, "seconds": seconds}
            for link, (size, seconds) in by_link(layout).items()
        },
        "unknown_loops": found.unknown,
        "compiled_layers": found.depths,
        "compiling": found.seconds,
    }


def write(path: Path, header: Row, layouts: Sequence[Layout]) -> None:
    """Write all layouts as JSON."""
    rows = [row(layout) for layout in layouts]
    path.write_text(json.dumps(header | {"layouts": rows}, indent=2) + "\n")


def memory(layouts: Sequence[Layout]) -> Table:
    """Return a table of compiled layouts with their use of a device."""
    table = Table(title="one device, one step", title_justify="left")
    table.add_column("layout")
    for name in ("parameters", "optimizer", "activations", "peak", "of"):
        table.add_column(name, justify="right")
    for name in ("10¹² operations", "compute", "memory", "network"):
        unit = "" if name.startswith("10") else "\nms"
        table.add_column(name + unit, justify="right")
    table.add_column("binds")
    for layout in layouts:
        found, times = layout.found, layout.times
        if found is None:
            continue
        links, m = network(found.devices), found.memory
        held = [m.parameters, m.optimizer, m.activations, m.peak]
        spent = [f"{1e3 * x:.4g}" for x in times] if times else ["–"] * 3
        table.add_row(
            str(layout), *map(_size, held), _size(links.memory) if links else "–",
            f"{found.flops / 1e12:.4g}", *spent,
            layout.reason or (times.binds if times else "–"),
        )  # fmt: skip
    return table


def sent(layout: Layout) -> Table:
    """Return a table of collectives by kind and number of devices."""
    table = Table(title=f"sent in a step: {layout}", title_justify="left")
    table.add_column("kind")
    table.add_column("links")
    for name in ("devices", "times", "results", "sent by each", "ms"):
        table.add_column(name, justify="right")
    if layout.found is None:
        return table
    links = network(layout.found.devices)
    groups: dict[tuple[str, str, int], list[collectives.Collective]] = {}
    for one in layout.found.sent:
        over = ", ".join(links.by_link(one)) if links else "–"
        groups.setdefault((one.kind, over, one.groups.shape[1]), []).append(one)
    for (kind, over, size), ones in sorted(groups.items(), key=lambda group: group[0]):
        seconds = sum(x.times * links.seconds(x) for x in ones) if links else None
        table.add_row(
            kind, over, str(size), str(sum(x.times for x in ones)),
            _size(sum(x.times * x.bytes for x in ones)), _size(sum(x.times * x.sent for x in ones)),
            "–" if seconds is None else f"{1e3 * seconds:.4g}",
        )  # fmt: skip
    return table


def by_link(layout: Layout) -> dict[str, tuple[float, float]]:
    """Return the bytes that a device sends over each kind of link, and the seconds they take.

    A collective over two kinds of links counts its seconds on the one that takes longer.
    """
    links = network(layout.found.devices) if layout.found else None
    sums: dict[str, tuple[float, float]] = {}
    if layout.found is None or links is None:
        return sums
    for one in layout.found.sent:
        split = links.by_link(one)
        for link, size in split.items():
            sent, seconds = sums.get(link, (0.0, 0.0))
            slow = link == max(split, key=lambda name: split[name] / links.speed(name))
            sums[link] = sent + one.times * size, seconds + slow * one.times * links.seconds(one)
    return sums


def link_line(layout: Layout) -> str:
    """Return a line with the bytes and the minimum time of each kind of link."""
    parts = [
        f"{link} {_size(sent)}, {1e3 * seconds:.4g} ms"
        for link, (sent, seconds) in sorted(by_link(layout).items())
    ]
    return "sent by each device over " + "; ".join(parts) if parts else ""


def remedies(found: Sequence[Remedy], tight: Layout) -> Table:
    """Return a table of remedies for a layout that does not fit."""
    title = f"remedies for {tight}, each on top of those above it"
    table = Table(title=title, title_justify="left")
    table.add_column("remedy")
    for name in ("needs", "of", "by", "ms"):
        table.add_column(name, justify="right")
    for one in found:
        times = one.layout.times if one.layout else None
        table.add_row(
            one.name, _size(one.needs), _size(tight.has or 0),
            "compiling" if one.layout else "estimate", f"{1e3 * times.step:.4g}" if times else "–",
        )  # fmt: skip
    return table


def _size(count: float) -> str:
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


def others(layouts: Sequence[Layout]) -> Table:
    """Return a table of layouts that do not fit or were not compiled, counted by reason."""
    table = Table(title="not compiled, or too large", title_justify="left")
    table.add_column("layouts", justify="right")
    table.add_column("such as")
    table.add_column("reason")
    reasons: dict[str, list[Layout]] = {}
    for layout in layouts:
        if layout.reason:
            reasons.setdefault(layout.reason, []).append(layout)
    for reason, same in reasons.items():
        table.add_row(str(len(same)), str(same[0]), reason)
    return table
