"""A tiny vision transformer on scikit-learn's 8×8 digits: 1,437 for training, 360 held out.

    python -m experiments.train --config=configs/digits.py

Measured on 2 CPU cores: 25 to 30 s for one seed, with imports, compilation and pictures.
Expect `test accuracy 98.8% ± 0.9%` (mean and standard deviation of seeds 0 … 4, --config.seeds=5).
On the same split, logistic regression has 96.7% and an RBF SVM 98.3%. The settings were tuned on a
fifth of the training images. The accuracy is measured after the last step.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the run's config, with flags such as `--config.optimizer.learning_rate=0.001`."""
    config = ConfigDict()
    config.task = "digits"
    config.seed = 0  # for initial parameters, the order of the data, augmentation and dropout
    config.seeds = 1  # train this many models in parallel, with seeds seed, seed + 1, …
    config.steps = 1000
    config.batch_size = 64
    config.label_smoothing = 0.1

    config.log_every = 50  # steps; logging waits for the device
    config.evaluate_every = 250
    config.checkpoint_every = 500
    config.keep_last = 2  # keep this many of the newest checkpoints
    config.keep_best = 1  # also keep the checkpoints with the lowest test loss at an evaluation
    config.max_skipped = 5  # stop after this many consecutive steps with a non-finite loss
    config.report_to = ""  # "wandb", "mlflow" or both, in addition to TensorBoard

    config.mesh = ConfigDict()
    config.mesh.data = -1  # devices for the batch; -1: all remaining ones
    config.mesh.fsdp = 1  # devices for the batch that also shard parameters and moments
    config.mesh.model = 1  # devices for the heads and the MLP's hidden features
    config.mesh.context = 1  # devices for the tokens
    config.mesh.force_host_devices = 0  # simulate this many CPU devices per process; 0: off

    config.model = ConfigDict()
    config.model.patch_size = 2
    config.model.features = 64
    config.model.num_layers = 2
    config.model.num_heads = 8
    config.model.num_kv_heads = 8
    config.model.mlp_dim = 128
    config.model.positions = "sinusoidal"  # or "learned"
    config.model.activation = "gelu"
    config.model.norm = "layernorm"
    config.model.dropout_rate = 0.0
    config.model.attention_dropout_rate = 0.0
    config.model.kernel = "auto"  # see flax_mha.explain

    config.augment = ConfigDict()
    config.augment.shift = 0.5  # pixels
    config.augment.rotate = 10.0  # degrees
    config.augment.scale = 0.1

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 4e-3  # the maximum, after the warm-up
    config.optimizer.warmup = 0.1  # as a share of the steps
    config.optimizer.final = 0.0  # the final learning rate, as a share of the maximum
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.99
    config.optimizer.weight_decay = 0.05  # of kernels only
    config.optimizer.clip_norm = 1.0
    config.optimizer.accumulate = 1  # batches whose gradients are averaged for an update
    return config
