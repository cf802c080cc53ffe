"""Load a folder in a process of its own, and print the memory that it took.

python -m tests.interop.loader FOLDER CAST AXIS [ADDRESS PROCESS], with the number of devices in
XLA_FLAGS. CAST is a dtype or "", AXIS the sharded axis or "".
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flax_mha import interop


def anonymous() -> int:
    """Return the bytes of memory of this process, without the pages of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def shardings(folder: Path, axis: str) -> Any:
    """Return shardings of every matrix on this axis over all devices. None for NumPy arrays."""
    if not axis:
        return None
    mesh = jax.make_mesh((jax.device_count(),), ("all",))

    def one(x: Any) -> NamedSharding:
        at, names = int(axis), [None] * x.ndim
        if x.ndim > 1 and x.shape[at] % mesh.size == 0:
            names[at] = "all"
        return NamedSharding(mesh, PartitionSpec(*names))

    family = interop.family(json.loads((folder / "config.json").read_text()))
    return jax.tree.map(one, jax.eval_shape(family.module.init, jax.random.key(0), *family.example))


def main(folder: str, cast: str, axis: str, address: str = "", process: str = "") -> None:
    """Print the bytes of the result and of the memory beyond it, and sums over both processes."""
    if address:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, 2, int(process))
    places = shardings(Path(folder), axis)
    # Loads code, whose memory would otherwise count.
    small = Path(folder) / "small"
    interop.load(small, dtype=cast or None, shardings=shardings(small, axis))
    start, peaks, is_loaded = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not is_loaded.wait(1e-3):
            peaks.append(anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    arrays = jax.tree.leaves(interop.load(folder, dtype=cast or None, shardings=places)[1])
    is_loaded.set()
    thread.join()
    held = sum(
        shard.data.nbytes for x in arrays for shard in getattr(x, "addressable_shards", ())
    ) or sum(x.nbytes for x in arrays)
    report = {"held": held, "beyond": max(peaks) - start - held}
    if address:
        sums = jax.jit(lambda xs: [(x.astype("float32") ** 2).sum() for x in xs])(arrays)
        report["sums"] = [float(x) for x in sums]
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
