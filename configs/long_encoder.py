"""The encoder of configs/masked.py grown to a pod's size: 32 heads, 8,192 wide, 8 layers, T=8,192.

    python -m experiments.plan --config=configs/long_encoder.py --topology=v5e:16x16

Has not been trained: it is what a plan is made of, 6.4 billion parameters. On one v5e-256, by the
compiler, a chip holds 5.4 of its 16 GiB, and a step takes 2.5 s at least. The plan took 26 s on
two CPU cores.
"""

from ml_collections import ConfigDict

from configs import masked


def get_config() -> ConfigDict:
    """The task of configs/masked.py, a row for each of 256 chips, parameters over all of them."""
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
