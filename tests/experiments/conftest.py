import pytest
from ml_collections import ConfigDict

from configs import digits


@pytest.fixture
def config() -> ConfigDict:
    """Return the digits config on one device, with a model that compiles quickly."""
    config = digits.get_config()
    config.steps, config.batch_size = 6, 16
    config.log_every, config.evaluate_every, config.checkpoint_every = 1, 3, 3
    config.mesh.data, config.mesh.model = 1, 1
    config.model.features, config.model.mlp_dim, config.model.num_layers = 16, 32, 1
    config.model.num_heads, config.model.num_kv_heads = 4, 4
    return config
