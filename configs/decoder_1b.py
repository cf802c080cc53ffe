"""A Llama-like decoder of 974 million parameters: 16 layers, 2,048 features, 32 heads, T=2,048.

    python -m experiments.plan --config=configs/decoder_1b.py --topology=v5e:4x4

This config is for the planner, and has not been trained at this size. For a v5e-16, the compiler
(libtpu 0.0.52) reports 1.48 of 16 GiB for each chip, and a step of 16 rows takes at least 91 ms.
The plan took 25 s on two CPU cores. Its tokens are bytes; --config.data.tokenizer=tokenizer.json
reads those of a Hugging Face tokenizer. docs/decoding.md has overrides for 7 billion parameters.

With these, 788,000 parameters train on two CPU cores in a minute, to 3.10 bits per byte:

    --config.mesh.fsdp=1 --config.length=128 --config.data.stride=64 --config.batch_size=4
    --config.steps=400 --config.evaluate_every=200 --config.checkpoint_every=200
    --config.optimizer.accumulate=2 --config.optimizer.learning_rate=0.003
    --config.model.features=128 --config.model.num_layers=4 --config.model.num_heads=8
    --config.model.num_kv_heads=2 --config.model.mlp_dim=384
"""

from ml_collections import ConfigDict

from configs import pydoc_lm


def get_config() -> ConfigDict:
    """Return the config of configs/pydoc_lm.py with a Llama-like decoder, a row for each chip."""
    config = pydoc_lm.get_config()
    config.length = 2048
    config.batch_size = 16  # over all chips; optimizer.accumulate multiplies it
    config.data.stride = 1024
    config.mesh.fsdp = 16
    config.model.features = 2048
    config.model.num_layers = 16
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.mlp_dim = 8192
    config.model.activation = "silu"
    config.model.gated = True
    config.model.dtype = "bfloat16"
    config.model.scan = True
    config.model.remat = True
    config.optimizer.learning_rate = 3e-4
    config.optimizer.b2 = 0.95
    return config
