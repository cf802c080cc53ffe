"""Plan a run on devices that this machine does not have.

    python -m experiments.plan --topology=v5e:16x16 --config=configs/long_encoder.py
    python -m experiments.plan --topology=v5p:8x8x8 --config.mesh.fsdp=64 --config.mesh.model=8
    python -m experiments.plan --topology=2xv5e:16x16 --config.batch_size=512    # two slices
    python -m experiments.plan --topology=h200:64 --config.mesh.fsdp=8 --config.mesh.model=8
    python -m experiments.plan --topology=v5e:16x16 --search --most=6
    python -m experiments.plan --topology=cpu:8 --config=configs/digits_sharded.py

The command compiles the trainer's step for the topology on this machine's CPU, and runs nothing.
It prints the memory, the operations, the communication and the minimum time of one device. The
layout is config.mesh, or with --search the fastest of all. docs/sharding.md explains the figures.

--config.KEY=VALUE changes a key of the config, as in `python -m experiments.train`, whose --help
lists the keys.
"""

import os
from pathlib import Path

# Before jax starts. With only one XLA thread per core, 8 devices on two cores can deadlock in
# collectives.
os.environ.setdefault("NPROC", "32")

import jax
from absl import flags

from experiments.common import command, libtpu
from experiments.common.phases import phase
from experiments.plan import devices, report, search
from experiments.runs import config

CONFIG = config.define(Path(__file__).parent.parent.parent / "configs" / "long_encoder.py")
flags.declare_key_flag("config")
TOPOLOGY = flags.DEFINE_string("topology", "v5e:16x16", "The devices, as in the examples.")
SEARCH = flags.DEFINE_bool("search", False, "Try all splits over data, fsdp, model and context.")
MOST = flags.DEFINE_integer("most", 8, "The number of splits that --search compiles.", 1)


def main(argv: list[str]) -> None:
    """Compile and print the plan."""
    del argv
    asked, topology = config.asked(CONFIG).config, TOPOLOGY.value
    jax.config.update("jax_platforms", "cpu")  # Other devices are described, not used.
    libtpu.quiet()
    with phase(f"describing {topology}"):
        found = devices.of(topology)
    compiler = report.compiler(found[0])
    print(f"{len(found)} × {found[0].device_kind}, compiled by {compiler}", flush=True)
    if SEARCH.value:
        report.show(search.search(asked, found, MOST.value))
    else:
        report.show([search.plan(asked, found)])


if __name__ == "__main__":
    command.run(main)
