"""The memory that a run's arrays need, without running it."""

import math
import os
from typing import Any

import jax
import numpy as np

from experiments.common.failures import RunError


def check_fits(program: Any) -> None:
    """Check that state and batch fit the memory, and trace a step, without running it.

    Args:
      program: the run's `experiments.trainer.mesh.Program`.
    """
    state, batch = program.abstract_state(), program.abstract_batch()
    here = program.mesh.local_devices
    needed = shard_bytes((state.params, state.opt_state, batch))
    available = (here[0].memory_stats() or {}).get("bytes_limit")
    if here[0].platform == "cpu":  # All devices share it.
        needed *= len(here)
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if available is not None and needed > available:
        raise RunError(
            f"parameters, optimizer and a batch must fit the memory of {available / 2**30:.1f} "
            f"GiB, got {needed / 2**30:,.1f} GiB; try smaller sizes of config.model, or a "
            f"smaller config.batch_size"
        )
    with program.on_mesh():
        jax.eval_shape(program.step, state, batch)


def shard_bytes(tree: Any) -> int:
    """Return the bytes of the shards that one device holds of a tree of arrays with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
    )
