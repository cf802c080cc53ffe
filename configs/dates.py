"""Written dates of twelve languages into ISO dates."""

from ml_collections import ConfigDict

from configs import digits


def get_config() -> ConfigDict:
    """Everything the run depends on."""
    config = ConfigDict()
    config.task = "translation"
    config.seed = 0
    config.seeds = 1
    config.steps = 900
    config.batch_size = 128

    config.log_every = 50
    config.evaluate_every = 300
    config.checkpoint_every = 300

    config.mesh = digits.get_config().mesh

    config.data = ConfigDict()
    config.data.path = ""  # a file of pairs, source TAB target a line; "": dates

    config.model = ConfigDict()
    config.model.features = 64
    config.model.encoder_layers = 2
    config.model.decoder_layers = 2
    config.model.num_heads = 4
    config.model.mlp_dim = 128
    config.model.activation = "relu"
    config.model.norm = "rmsnorm"
    config.model.dropout_rate = 0.0
    config.model.kernel = "auto"

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup = 0.1
    config.optimizer.final = 0.0
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.98
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0
    return config
