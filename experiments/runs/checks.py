"""Checks of a run against the machine: the sizes of its mesh, and its memory."""

import math
import os
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.runs.failures import RunError


def check_fits(program: Any) -> None:
    """Check that state and batch fit the memory, and a step these devices, without running it.

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


def check_size(key: str, value: int, most: int, of: str) -> None:
    """Check that the value of a key is in 1 … most, a number described by `of`."""
    if not 1 <= value <= most:
        raise RunError(f"{key} must be in 1 … {of}={most}, got {value}; try {max(1, most // 4)}")


def read_remat(model: ConfigDict) -> bool | tuple[str, ...]:
    """Return a block's `remat` for `config.model.remat`, such as "z,lse"."""
    value = model.remat
    return value if isinstance(value, bool) else tuple(value.split(","))


def shard_bytes(tree: Any) -> int:
    """Return the bytes of the shards that one device holds of a tree of arrays with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
    )
