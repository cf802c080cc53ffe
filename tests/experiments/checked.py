"""The train command with a bitwise check of the restored checkpoint against a file.

python -m tests.experiments.checked --distributed … with the file in the environment as EXPECTED.
"""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import command
from experiments.trainer import loop, mesh
from experiments.trainer.checkpoints import Checkpoints


def flat(state: Any) -> dict[str, jax.Array]:
    """Return the leaves by path, with random keys as their numbers."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    named = {jax.tree_util.keystr(path): x for path, x in leaves}
    return {
        name: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for name, x in named.items()
    }


def restored(built: mesh.Program, folder: Path) -> tuple[loop.TrainState, Any]:
    """Return the state and data of a run's latest checkpoint."""
    stream = built.batches()
    with built.on_mesh(), Checkpoints(folder, read_only=True) as checkpoints:
        saved = checkpoints.restore(built, stream)
        assert saved is not None
        return saved.state, stream


class Checked(Checkpoints):
    """Checkpoints that are compared when restored."""

    def restore(self, *args: Any) -> Any:
        saved = super().restore(*args)
        expected = np.load(os.environ["EXPECTED"])
        found = flat(saved.state)
        assert set(found) == set(expected)
        for name, x in found.items():
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[name][shard.index])
        print(f"process {jax.process_index()} restored {len(found)} arrays to the bit", flush=True)
        return saved


if __name__ == "__main__":
    from experiments import train  # Its flags must not be defined in other test processes.

    loop.Checkpoints = Checked
    command.run(train.main)
