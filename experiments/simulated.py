"""Devices that a CPU's cores stand in for."""

import os

import jax


def force_host_devices(count: int) -> int:
    """Make a number of CPU devices of this host's cores, unless the environment sets it.

    Args:
      count: the CPU devices of this process; 0 leaves them as they are.

    Returns:
      The number that was made; 0 for none.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if not count or "host_platform_device" in flags or "JAX_NUM_CPU_DEVICES" in os.environ:
        return 0
    jax.config.update("jax_num_cpu_devices", count)
    # Threads for XLA: with those of few cores, many devices can wait for each other for ever.
    os.environ.setdefault("NPROC", str(4 * count))
    return count
