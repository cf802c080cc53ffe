"""A byte-level language model on Python's documentation."""

from ml_collections import ConfigDict

from configs import digits


def get_config() -> ConfigDict:
    """Everything the run depends on."""
    config = ConfigDict()
    config.task = "text"
    config.seed = 0
    config.seeds = 1
    config.steps = 2400
    config.batch_size = 8
    config.length = 128  # bytes that a prediction can be made from

    config.log_every = 50
    config.evaluate_every = 600
    config.checkpoint_every = 600

    config.mesh = digits.get_config().mesh

    config.data = ConfigDict()
    config.data.path = ""  # a file of text; "": pydoc_data.topics
    config.data.split = "test"  # or "validation", to choose settings by
    config.data.stride = 32  # of the windows over the held-out text

    config.model = ConfigDict()
    config.model.features = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_dim = 512
    config.model.activation = "relu"
    config.model.gated = False
    config.model.norm = "rmsnorm"
    config.model.tied = True
    config.model.dropout_rate = 0.0
    config.model.attention_dropout_rate = 0.0
    config.model.kernel = "auto"

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 4e-3
    config.optimizer.warmup = 0.1
    config.optimizer.final = 0.05
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.98
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    return config
