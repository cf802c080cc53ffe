"""The digits on 8 devices: the batch 4-way, parameters and moments 2-way, heads 2-way.

    python -m experiments.train --config=configs/digits_sharded.py

On 8 GPUs or TPUs the run uses these. Without accelerators JAX simulates 8 devices on the CPU, which
tests the sharding, but is slower than one device.

Measured on 2 busy CPU cores: 49 s, and 23 s for configs/digits.py. Their losses agree within 1e-5
for 250 steps; then rounding errors, amplified by training, separate them. This run's final test
accuracy was 98.3%, the other's 98.9%.
"""

from ml_collections import ConfigDict

from configs import digits


def get_config() -> ConfigDict:
    """Return the config of configs/digits.py with another mesh."""
    config = digits.get_config()
    config.mesh.data = 2
    config.mesh.fsdp = 2
    config.mesh.model = 2
    config.mesh.force_host_devices = 8
    return config
