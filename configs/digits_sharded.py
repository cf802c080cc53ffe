"""The digits over 8 devices: the batch 4-way, parameters and moments 2-way, heads 2-way.

    python -m experiments.train --config=configs/digits_sharded.py

Where there is only a CPU, its cores serve as 8 devices: this shows that the run works and gives the
numbers of configs/digits.py to float rounding, not that it is fast. On 8 GPUs or TPUs it takes
those.
"""

from ml_collections import ConfigDict

from configs import digits


def get_config() -> ConfigDict:
    """The run of configs/digits.py, on another mesh."""
    config = digits.get_config()
    config.mesh.data = 2
    config.mesh.fsdp = 2
    config.mesh.model = 2
    config.mesh.force_host_devices = 8
    return config
