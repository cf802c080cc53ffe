"""Plan a run on absent devices.

    python -m experiments.plan --config=configs/long_encoder.py --topology=v5e:16x16
    python -m experiments.plan --topology=v5p:8x8x8 --config.mesh.fsdp=64 --config.mesh.model=8
    python -m experiments.plan --topology=2xv5e:16x16 --config.batch_size=512    # two slices
    python -m experiments.plan --topology=h200:8 --config.mesh.model=8
    python -m experiments.plan --topology=v5e:16x16 --search --most=6
    python -m experiments.plan --topology=cpu:8 --config=configs/digits_sharded.py
    python -m experiments.plan --scaling    # the study of docs/scaling.md

The command compiles the trainer's step for the topology on this machine's CPU. It reports the
memory, the operations and the communication of one device, and writes plan.json to --workdir
(default: a new folder under runs/). Without --search the layout is config.mesh. If no
layout fits, the command tries changes of the config, from the cheapest on.
"""

import datetime
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Before jax starts. With only one XLA thread per core, 8 devices on two cores can deadlock in
# collectives.
os.environ.setdefault("NPROC", "32")

import jax
from absl import app, flags

from experiments import libtpu, phases
from experiments.phases import Phase
from experiments.plan import devices, remedies, report, scaling, search
from experiments.runs import folders, settings

PROGRAM = "experiments.plan"
DEFAULT = Path(__file__).parent.parent.parent / "configs" / "long_encoder.py"
TOPOLOGY = flags.DEFINE_string(
    "topology", "v5e:16x16", "The devices, such as v5e:16x16, 2xv5e:16x16, h200:8 or cpu:8."
)
SEARCH = flags.DEFINE_bool("search", False, "Try all splits over data, fsdp, model and context.")
MOST = flags.DEFINE_integer(
    "most", 8, "The number of splits that --search compiles.", lower_bound=1
)
WHOLE = flags.DEFINE_bool(
    "whole", False, "Compile all layers of models without a loop, instead of 4 and 8 of them."
)
SCALING = flags.DEFINE_bool("scaling", False, "Run the study of docs/scaling.md, which takes long.")
WORKDIR = flags.DEFINE_string("workdir", None, "A new or empty folder for the results.")


def main(asked: settings.Asked) -> None:
    """Compile, report and draw the plan."""
    if not TOPOLOGY.value.startswith("gpu"):
        jax.config.update("jax_platforms", "cpu")
        libtpu.quiet()
    if SCALING.value:
        scaling.study(Path(WORKDIR.value or folders.new_folder("scaling")))
    else:
        _plan(asked)


def _plan(asked: settings.Asked) -> None:
    config = asked.config
    with Phase(f"describing {TOPOLOGY.value}"):
        found = devices.of(TOPOLOGY.value)
    folder, kind = folders.result_folder(WORKDIR.value, "plan"), found[0].device_kind
    header = {
        "program": PROGRAM,
        "command": sys.argv,
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "topology": TOPOLOGY.value,
        "device": kind,
        "config": config.to_dict(),
        "jax": jax.__version__,
        "compiler": report.compiler(found[0]),
    }
    print(f"{len(found)} × {kind}, {TOPOLOGY.value}, compiled by {header['compiler']}", flush=True)
    with Phase(f"compiling for {TOPOLOGY.value}"):
        if SEARCH.value:
            layouts = search.search(config, found, MOST.value, _tell, WHOLE.value)
        else:
            layouts = [search.plan(config, found, WHOLE.value)]
    _print(layouts)
    tight = [layout for layout in layouts if layout.reason and layout.needs]
    if tight and all(layout.reason for layout in layouts):
        best = min(tight, key=lambda layout: layout.needs or 0)
        with Phase("looking for remedies"):
            tried = remedies.find(config, found, best, WHOLE.value)
        _print_remedies(tried, best)
        layouts += [remedy.layout for remedy in tried if remedy.layout]
    report.write(folder / "plan.json", header, layouts)
    seconds = sum(layout.found.seconds for layout in layouts if layout.found)
    print(f"{seconds:.0f} s to compile; plan.json is in {folder}")


def _print(layouts: Sequence[search.Layout]) -> None:
    compiled = [layout for layout in layouts if layout.found]
    if compiled:
        print(f"one device, one step\n\n{report.memory(compiled)}\n\n{report.sent(compiled[0])}\n")
        print(report.link_line(compiled[0]))
    if any(layout.reason for layout in layouts):
        print(f"{report.others(layouts)}\n")
    for layout in compiled[:1]:
        if layout.found and layout.found.unknown:
            print(f"loops of unknown length, counted once: {layout.found.unknown}")
        if layout.found and layout.found.depths:
            print(f"extrapolated from compiled steps of {layout.found.depths} layers")


def _print_remedies(tried: Sequence[remedies.Remedy], tight: search.Layout) -> None:
    print(f"{report.remedies(tried, tight)}\n")
    last = tried[-1].layout if tried else None
    if last is None or last.reason:
        print("no remedy fits; take more devices, or a smaller model or config.length")
    else:
        print(f"fits with {tried[-1].flags}")


def _tell(layout: search.Layout) -> None:
    phases.say(f"compiled {layout}", sys.stderr)


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(settings.parse, default=DEFAULT))
