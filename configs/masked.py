"""A small encoder that predicts masked bytes of Python's reference manual, 430 kB of text.

    python -m experiments.train --config=configs/masked.py

Measured on 2 busy CPU cores: 9 minutes. Seed 0 ended with
`test 2.83 bits a hidden byte, 46.6% right`. The most frequent byte between the same two neighbors
is right for 48.2%, so 600 steps only come close to counting.
"""

from ml_collections import ConfigDict, FieldReference

from configs import digits


def get_config() -> ConfigDict:
    """Return the run's config, with mesh and optimizer of configs/digits.py."""
    base = digits.get_config()
    config = ConfigDict()
    config.task = "masked"
    config.seed = 0  # for initial parameters, the order of the data, and the masked bytes
    config.seeds = 1  # train this many models in parallel, with seeds seed, seed + 1, …
    config.steps = 600
    config.batch_size = 16
    config.length = 128  # bytes in an example
    config.hidden = 0.15  # the share of bytes that are masked

    config.log_every = 50  # steps; logging waits for the device
    config.evaluate_every = 200
    config.checkpoint_every = 300
    config.keep_last = 2
    config.keep_best = 1
    config.max_skipped = 5
    config.report_to = ""

    config.mesh = base.mesh

    config.model = ConfigDict()
    config.model.features = 64
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.mlp_dim = 256
    config.model.activation = "gelu"
    config.model.norm = "rmsnorm"
    config.model.dropout_rate = 0.0
    config.model.kernel = "auto"  # see flax_mha.explain
    config.model.dtype = "float32"  # the dtype of the computation; parameters are float32
    config.model.scan = True  # run the layers in one loop, compiled once
    # The activations that the backward pass finds in memory: False for all, True for each layer's
    # input, or names, such as "products,q,k,v,z,lse" (docs/performance.md)
    config.model.remat = FieldReference(False, field_type=object)

    config.optimizer = base.optimizer
    config.optimizer.learning_rate = 4e-3
    return config
