"""The digits over 8 devices: the batch 4-way, parameters and moments 2-way, heads 2-way.

    python -m experiments.train --config=configs/digits_sharded.py

Where there is only a CPU, its cores serve as 8 devices: that shows that it works, and is slower. On
8 GPUs or TPUs it takes those.

Measured on 2 CPU cores that did other things too: 49 s, where configs/digits.py took 23 s. Their
losses agree within 1e-5 for 250 steps; then rounding, which training amplifies, parts them. Of the
360 test images this one got 98.3% right at the end, the other 98.9%.
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
