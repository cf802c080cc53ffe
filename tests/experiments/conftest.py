import pytest
from ml_collections import ConfigDict

from configs import digits, pydoc_lm


def small() -> ConfigDict:
    """Return the digits config on one device, with a model that compiles quickly."""
    config = digits.get_config()
    config.steps, config.batch_size = 6, 16
    config.log_every, config.evaluate_every, config.checkpoint_every = 1, 3, 3
    config.mesh.data, config.mesh.model = 1, 1
    config.model.features, config.model.mlp_dim, config.model.num_layers = 16, 32, 1
    config.model.num_heads, config.model.num_kv_heads = 4, 4
    return config


@pytest.fixture
def config() -> ConfigDict:
    return small()


@pytest.fixture
def text_config() -> ConfigDict:
    """Return the config of a small decoder of bytes."""
    config = pydoc_lm.get_config()
    config.steps, config.length, config.data.stride, config.batch_size = 4, 16, 16, 4
    config.model.features, config.model.mlp_dim, config.model.num_layers = 16, 16, 2
    config.model.num_heads, config.model.num_kv_heads, config.mesh.data = 2, 1, 1
    return config
