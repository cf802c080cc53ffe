"""The encoder of configs/masked.py for a pod: 32 heads, 8,192 features, 8 layers, T=8,192.

    python -m experiments.plan --config=configs/long_encoder.py --topology=v5e:16x16

This config with 6.4 billion parameters is for the planner, and has not been trained. On a v5e-256,
the compiler reports 5.4 of 16 GiB for each chip, and a step takes at least 2.5 s. The plan took
26 s on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import masked


def get_config() -> ConfigDict:
    """Return the config of configs/masked.py with an example and a parameter shard on each chip."""
    config = masked.get_config()
    config.length = 8192
    config.batch_size = 256
    config.mesh.fsdp = 256
    config.model.features = 8192
    config.model.num_layers = 8
    config.model.num_heads = 32
    config.model.num_kv_heads = 32
    config.model.mlp_dim = 32768
    config.model.dtype = "bfloat16"
    config.model.remat = True
    return config
