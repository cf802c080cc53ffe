"""A plan as tables, and as JSON."""

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import tables
from experiments.plan import collectives
from experiments.plan.remedies import Remedy
from experiments.plan.roofline import network
from experiments.plan.search import Layout

Row = dict[str, Any]


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


def memory(layouts: Sequence[Layout]) -> str:
    """Return a table of compiled layouts with their use of a device in a step."""
    lines = [tables.head(
        "layout", "parameters", "optimizer", "activations", "peak", "of", "10¹² operations",
        "compute, ms", "memory, ms", "network, ms", "binds",
    )]  # fmt: skip
    for layout in layouts:
        found, times = layout.found, layout.times
        if found is None:
            continue
        links, m = network(found.devices), found.memory
        held = [m.parameters, m.optimizer, m.activations, m.peak]
        spent = [f"{1e3 * x:.4g}" for x in times] if times else ["–"] * 3
        lines.append(tables.line(
            layout, *map(_size, held), _size(links.memory) if links else "–",
            f"{found.flops / 1e12:.4g}", *spent,
            layout.reason or (times.binds if times else "–"),
        ))  # fmt: skip
    return "\n".join(lines)


def sent(layout: Layout) -> str:
    """Return a table of the collectives of a step, by kind and number of devices."""
    lines = [tables.head(f"sent in a step: {layout}", "links", "devices", "times", "results",
                         "sent by each", "ms")]  # fmt: skip
    found = layout.found.sent if layout.found else []
    links = network(layout.found.devices) if layout.found else None
    groups: dict[tuple[str, str, int], list[collectives.Collective]] = {}
    for one in found:
        over = ", ".join(links.by_link(one)) if links else "–"
        groups.setdefault((one.kind, over, one.groups.shape[1]), []).append(one)
    for group, ones in sorted(groups.items(), key=lambda group: group[0]):
        seconds = sum(x.times * links.seconds(x) for x in ones) if links else None
        lines.append(tables.line(
            *group, sum(x.times for x in ones), _size(sum(x.times * x.bytes for x in ones)),
            _size(sum(x.times * x.sent for x in ones)),
            "–" if seconds is None else f"{1e3 * seconds:.4g}",
        ))  # fmt: skip
    return "\n".join(lines)


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


def remedies(found: Sequence[Remedy], tight: Layout) -> str:
    """Return a table of remedies for a layout that does not fit."""
    title = f"remedies for {tight}, each on top of those above it"
    lines = [tables.head(title, "needs", "of", "by", "ms")]
    for one in found:
        times = one.layout.times if one.layout else None
        lines.append(tables.line(
            one.name, _size(one.needs), _size(tight.has or 0),
            "compiling" if one.layout else "estimate", f"{1e3 * times.step:.4g}" if times else "–",
        ))  # fmt: skip
    return "\n".join(lines)


def _size(count: float) -> str:
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


def others(layouts: Sequence[Layout]) -> str:
    """Return a table of layouts that do not fit or were not compiled, counted by reason."""
    reasons: dict[str, list[Layout]] = {}
    for layout in layouts:
        if layout.reason:
            reasons.setdefault(layout.reason, []).append(layout)
    lines = [tables.head("not compiled, or too large", "such as", "reason")]
    lines += [tables.line(len(same), same[0], reason) for reason, same in reasons.items()]
    return "\n".join(lines)
