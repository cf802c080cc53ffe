"""An encoder-decoder that translates dates in twelve languages and seven scripts to ISO dates.

    python -m experiments.train --config=configs/dates.py
    python -m experiments.generate --workdir=runs/translation-… --prompt="samedi 3 mars 2012"

The data are the dates of 1900 to 2099 in the CLDR's short, medium, long and full formats, written
by Babel. Two-digit years mean 1969 to 2068. The ambiguous format en_US short is left out. 2,000
dates are held out in all formats, and the Italian full format (`sabato 3 marzo 2012`, with weekdays
that occur nowhere else) is not in the training data.

Measured on 2 CPU cores, with Babel 2.18: 2 min 8 s, with imports, compilation and pictures.
Expect `exact match: 100.0% of held-out pairs, 93.4% in the unseen style it full` (of 1,000 and of
500, greedy). Babel's parser reads 36.9% of the former correctly in at least one of its formats.

To use your own pairs, pass --config.data.path=FILE with a source, a tab and a target on each line.
Every tenth line is held out.
"""

from ml_collections import ConfigDict

from configs import digits


def get_config() -> ConfigDict:
    """Return the run's config."""
    config = ConfigDict()
    config.task = "translation"
    config.seed = 0
    config.seeds = 1
    config.steps = 900
    config.batch_size = 128

    config.log_every = 50
    config.evaluate_every = 300
    config.checkpoint_every = 300
    config.keep_last = 2
    config.keep_best = 1
    config.max_skipped = 5
    config.report_to = ""

    config.mesh = digits.get_config().mesh

    config.data = ConfigDict()
    config.data.path = ""  # a file with source TAB target on each line; "": dates

    config.model = ConfigDict()
    config.model.features = 64
    config.model.encoder_layers = 2
    config.model.decoder_layers = 2
    config.model.num_heads = 4
    config.model.mlp_dim = 128
    config.model.activation = "relu"  # much faster than the others on a CPU
    config.model.norm = "rmsnorm"
    config.model.dropout_rate = 0.0
    config.model.kernel = "auto"  # see flax_mha.explain

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup = 0.1
    config.optimizer.final = 0.0
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.98
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0
    config.optimizer.accumulate = 1  # batches whose gradients are averaged for an update
    return config
