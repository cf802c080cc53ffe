"""Load a folder onto devices in its own process, and print the memory that it took.

python -m tests.interop.loader FOLDER CAST DIVIDED [ADDRESS PROCESS], with the number of devices in
XLA_FLAGS. CAST is a dtype or "", DIVIDED the sharded axis or "". Two processes each read the part
of their own devices.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.measure.peers.fresh import growth
from flax_mha import interop
from flax_mha.interop import device_put


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

    found = interop.family(json.loads((folder / "config.json").read_text()))
    return jax.tree.map(one, jax.eval_shape(found.module.init, jax.random.key(0), *found.example))


def main(folder: str, cast: str, axis: str, address: str = "", process: str = "") -> None:
    """Print the memory beyond the result, the largest slice, the bytes read, and sums."""
    if address:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, 2, int(process))
    places = shardings(Path(folder), axis)
    # Loads code, whose memory would otherwise count.
    small = Path(folder) / "small"
    interop.load(small, dtype=cast or None, shardings=shardings(small, axis))
    read, given = list[int](), device_put.in_memory

    def counted(x: np.ndarray) -> np.ndarray:
        read.append(x.nbytes)
        return given(x)

    device_put.in_memory = counted
    kept: list[Any] = []
    grown = growth(
        lambda: kept.append(interop.load(folder, dtype=cast or None, shardings=places)[1])
    )
    arrays = jax.tree.leaves(kept)
    parts = [
        [shard.data for shard in x.addressable_shards] if isinstance(x, jax.Array) else [x]
        for x in arrays
    ]
    slices = [x.nbytes for of_one in parts for x in of_one]
    says = {"beyond": grown - sum(slices), "largest": max(slices), "read": sum(read)}
    if address:
        # The sums over the shards of both processes.
        sums = jax.jit(lambda xs: [(x.astype("float32") ** 2).sum() for x in xs])(arrays)
        says["sums"] = [float(x) for x in sums]
    print(json.dumps(says))


if __name__ == "__main__":
    main(*sys.argv[1:])
