"""The growth of time, memory and communication of a device with the number of devices.

Weak scaling keeps the rows per device, strong scaling the total rows. Up to 8 devices, simulated on
this machine's cores, the step of configs/masked.py runs. From 8 to 4,096, the step of an encoder of
width 2,048 is compiled for TPU v5p.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter
from ml_collections import ConfigDict

from configs import long_encoder, masked
from experiments import plots, tables, tasks
from experiments.phases import Phase
from experiments.plan import devices, report, search
from experiments.runs import hosts
from experiments.trainer import loop, mesh

Row = dict[str, Any]
HERE = (1, 2, 4, 8)
ROWS_HERE = 8  # per device in weak scaling; strong scaling keeps the total of 8 devices
PODS = {8: "v5p:2x2x2", 64: "v5p:4x4x4", 512: "v5p:8x8x8", 4096: "v5p:16x16x16"}
ROWS = 64  # the total in strong scaling; in weak scaling each device has one
SHARES = 512  # the most shards of parameters: 4 of their 2,048 features each
STEPS = 10
PANELS = {
    "milliseconds": "ms per step (v5p: minimum)",
    "peak": "peak memory per device, MiB",
    "sent": "sent per device and step, MiB",
}
COLORS = {"cores": "tab:blue", "v5p": "tab:orange"}


def study(folder: Path) -> None:
    """Compile and measure, write scaling.json and scaling.png, and print the table.

    An incomplete scaling.json in the folder is continued, because each point takes minutes.
    """
    hosts.force_host_devices(max(HERE))
    here, path = jax.devices("cpu"), folder / "scaling.json"
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    for law in ("weak", "strong"):
        for where, counts in (("v5p", tuple(PODS)), ("cores", HERE)):
            for count in counts:
                if any(_point(row) == (law, where, count) for row in rows):
                    continue
                # With equal rows, both laws compile the same program.
                config = large(law, count) if where == "v5p" else small(law, count)
                twin = [row for row in rows if _point(row)[1:] == (where, count)]
                twin = [row | {"law": law} for row in twin if row["rows"] == config.batch_size]
                with Phase(f"{law} scaling, {count} devices, {where}"):
                    found = devices.of(PODS[count]) if where == "v5p" else here[:count]
                    rows += twin[:1] or [_measured(law, where, config, found)]
                path.write_text(json.dumps(rows, indent=2) + "\n")
    draw(folder / "scaling.png", rows)
    print(table(rows))
    print(f"scaling.json and scaling.png are in {folder}")


def _point(row: Row) -> tuple[str, str, int]:
    return row["law"], row["where"], row["devices"]


def small(law: str, count: int) -> ConfigDict:
    """Return the config of the run that is timed on this machine's cores."""
    config = masked.get_config()
    config.batch_size = ROWS_HERE * (count if law == "weak" else max(HERE))
    config.mesh.data, config.mesh.fsdp = 1, count
    return config


def large(law: str, count: int) -> ConfigDict:
    """Return the config of the compiled run: rows over all possible devices, tokens over the
    rest.
    """
    config = long_encoder.get_config()
    config.model.features, config.model.mlp_dim = 2048, 8192
    config.model.num_heads = config.model.num_kv_heads = 16
    config.batch_size = count if law == "weak" else ROWS
    over_rows = min(count, config.batch_size)
    config.mesh.fsdp = min(over_rows, SHARES)
    config.mesh.data, config.mesh.context = over_rows // config.mesh.fsdp, count // over_rows
    return config


def _measured(law: str, where: str, config: ConfigDict, found: Sequence[jax.Device]) -> Row:
    layout = search.plan(config, found)
    row: Row = {"law": law, "where": where, "devices": len(found), "rows": config.batch_size}
    if layout.found:
        memory = layout.found.memory
        row |= {
            "held": (memory.parameters + memory.optimizer) / 2**20,
            "peak": memory.peak / 2**20,
            "sent": sum(one.times * one.sent for one in layout.found.sent) / 2**20,
            "flops": layout.found.flops,
        }
    if where == "cores":
        wall, busy = _timed(config, found)
        row |= {"milliseconds": 1e3 * wall, "processor": 1e3 * busy / len(found)}
    elif layout.times:
        row |= {"milliseconds": 1e3 * layout.times.step, "binds": layout.times.binds}
    return row | {"layout": report.row(layout)}


def _timed(config: ConfigDict, found: Sequence[jax.Device]) -> tuple[float, float]:
    """Return the seconds of a step: the median of wall time, and the mean CPU time of all cores."""
    built = loop.build(config, tasks.make(config), found)
    with mesh.on(built.mesh):
        state = built.create(built.seeds)
        batch = built.put(next(built.batches()))
        state, _ = jax.block_until_ready(built.step(state, batch))  # compiles
        walls, busy = [], time.process_time()
        for _ in range(STEPS):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(built.step(state, batch))
            walls.append(time.perf_counter() - start)
        return statistics.median(walls), (time.process_time() - busy) / STEPS


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with a line for each law and number of devices."""
    lines = [tables.head(
        "scaling", "devices", "rows", "layout", "parameters, optimizer", "peak", "sent",
        "10⁹ operations", "ms per step",
    )]  # fmt: skip
    for row in rows:
        over = ", ".join(f"{a} {n}" for a, n in row["layout"]["mesh"].items() if n > 1) or "–"
        cells = [row["law"], f"{row['devices']:,} {row['where']}", f"{row['rows']:,}", over]
        if "peak" not in row:
            lines.append(tables.line(*cells, *["–"] * 4, row["layout"]["reason"]))
            continue
        cells += [f"{row[name]:,.4g}" for name in ("held", "peak", "sent")]
        cells.append(f"{row['flops'] / 1e9:,.4g}")
        busy = f"{row.get('processor', 0):.3g} ms of CPU time per device"
        how = busy if "processor" in row else row["binds"]
        lines.append(tables.line(*cells, f"{row['milliseconds']:.4g} ({how})"))
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw a row of panels for each law, with logarithmic axes."""
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    for law, panels in zip(("weak", "strong"), figure.subplots(2, 3, sharex=True), strict=True):
        for axes, (name, label) in zip(panels, PANELS.items(), strict=True):
            for where, color in COLORS.items():
                mine = [
                    row for row in rows
                    if (row["law"], row["where"]) == (law, where) and row.get(name)
                ]  # fmt: skip
                axes.plot(
                    [row["devices"] for row in mine], [row[name] for row in mine],
                    color=color, marker="o", markersize=4,
                    label="cores as devices, D=64" if where == "cores" else "TPU v5p, D=2,048",
                )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set(ylabel=label, ylim=(low / 3, high * 3))
            axes.xaxis.set_major_locator(FixedLocator([1, 8, 64, 512, 4096]))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
            axes.grid(alpha=0.3, which="both")
        fixed = "rows per device fixed" if law == "weak" else "total rows fixed"
        panels[1].set_title(f"{law} scaling: {fixed}")
    for axes in panels:
        axes.set_xlabel("devices")
    panels[0].legend(fontsize=9)
    plots.save(figure, path, 110)
