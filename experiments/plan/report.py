"""A plan as tables."""

import importlib.metadata
from collections import Counter
from collections.abc import Sequence

import jax

from experiments.common import tables
from experiments.plan import roofline
from experiments.plan.collectives import Collective
from experiments.plan.search import Layout


def compiler(device: jax.Device) -> str:
    """Return the compiler of a device and its version, because memory differs between them."""
    package = {"tpu": "libtpu", "gpu": "jax-cuda13-pjrt"}.get(device.platform, "jaxlib")
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:  # A plugin for another CUDA version.
        return f"jaxlib {importlib.metadata.version('jaxlib')}"


def memory(layouts: Sequence[Layout]) -> str:
    """Return a table of layouts with their use of a device in a step."""
    lines = [tables.head(
        "layout", "parameters", "optimizer", "activations", "peak", "of", "10¹² operations",
        "compute, ms", "memory, ms", "network, ms", "binds",
    )]  # fmt: skip
    for layout in layouts:
        found, times, has = layout.found, layout.times, _size(layout.has)
        if found is None:
            lines.append(tables.line(layout, *"–––", _size(layout.needs), has, *"–––––"))
            continue
        m = found.memory
        lines.append(tables.line(
            layout, *map(_size, (m.parameters, m.optimizer, m.activations, m.peak)), has,
            f"{found.flops / 1e12:.4g}", *([f"{1e3 * x:.4g}" for x in times] if times else "–––"),
            "too large" if layout.reason else times.binds if times else "–",
        ))  # fmt: skip
    return "\n".join(lines)


def sent(layout: Layout) -> str:
    """Return a table of the collectives of a step, by kind, links and number of devices."""
    lines = [tables.head(f"sent in a step: {layout}", "links", "devices", "times", "results",
                         "sent by each", "ms")]  # fmt: skip
    found = layout.found.sent if layout.found else []
    links = roofline.network(layout.found.devices) if layout.found else None
    groups = dict[tuple[str, str, int], list[Collective]]()
    for one in found:
        over = ", ".join(links.by_link(one)) if links else "–"
        groups.setdefault((one.kind, over, one.groups.shape[1]), []).append(one)
    for group, ones in sorted(groups.items(), key=lambda group: group[0]):
        milliseconds = 1e3 * sum(x.times * links.seconds(x) for x in ones) if links else None
        lines.append(tables.line(
            *group, sum(x.times for x in ones), _size(sum(x.times * x.bytes for x in ones)),
            _size(sum(x.times * x.sent for x in ones)),
            "–" if milliseconds is None else f"{milliseconds:.4g}",
        ))  # fmt: skip
    return "\n".join(lines)


def _size(count: float | None) -> str:
    if count is None:
        return "–"
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


def show(layouts: Sequence[Layout]) -> None:
    """Print the tables of a plan, and say if nothing fits."""
    fits = [layout for layout in layouts if not layout.reason]
    tried = [layout for layout in layouts if layout.needs]
    print(f"one device, one step\n\n{memory(tried)}\n")
    if fits:
        print(f"{sent(fits[0])}\n")
    else:
        print("nothing fits; docs/sharding.md lists changes of the config that take less memory")
    left = [layout.reason for layout in layouts if layout.reason and layout.needs is None]
    for reason, count in Counter(left).items():
        print(f"not compiled: {count} × {reason}")
    if unknown := [loop for layout in tried if layout.found for loop in layout.found.unknown]:
        print(f"loops of unknown length, counted once: {unknown}")
