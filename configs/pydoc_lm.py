"""A byte-level language model on Python's documentation: 434 kB for training, 32 kB held out.

    python -m experiments.train --config=configs/pydoc_lm.py
    python -m experiments.generate --workdir=runs/text-… --prompt="The import statement"

The model is a decoder of 4 blocks with rotary positions and grouped heads, 755,000 parameters.
Measured on 2 CPU cores, with Python 3.11.7, whose 79 topics have 464,970 characters: 3 min 54 s,
with imports, compilation and pictures. Expect `held-out text: 1.990 bits per byte`. On the same
text gzip has 2.769, xz 2.643, and an interpolated Witten-Bell 6-gram model of the training text
2.342. Every byte is predicted once, from the 96 to 127 bytes before it, or fewer at the beginning.

The settings were tuned on a tenth of the training topics (--config.data.split=validation).
To use your own text, pass --config.data.path=FILE; its last tenth is held out.
"""

from ml_collections import ConfigDict, FieldReference

from configs import digits


def get_config() -> ConfigDict:
    """Return the run's config."""
    config = ConfigDict()
    config.task = "text"
    config.seed = 0  # for initial parameters, the order of the data, and dropout
    config.seeds = 1  # train this many models in parallel, with seeds seed, seed + 1, …
    config.steps = 2400
    config.batch_size = 8
    config.length = 128  # bytes, or tokens, in a training example

    config.log_every = 50
    config.evaluate_every = 600
    config.checkpoint_every = 600
    config.keep_last = 2
    config.keep_best = 1
    config.max_skipped = 5
    config.report_to = ""

    config.mesh = digits.get_config().mesh

    config.data = ConfigDict()
    config.data.path = ""  # a text file; "": pydoc_data.topics
    config.data.tokenizer = ""  # a Hugging Face tokenizer.json; "": bytes
    config.data.split = "test"  # or "validation", to tune settings
    config.data.stride = 32  # the stride of windows over the held-out text

    config.model = ConfigDict()
    config.model.features = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_dim = 512
    config.model.activation = "relu"  # much faster than the others on a CPU
    config.model.gated = False
    config.model.norm = "rmsnorm"
    config.model.tied = True
    config.model.dropout_rate = 0.0
    config.model.attention_dropout_rate = 0.0
    config.model.kernel = "auto"  # see flax_mha.explain
    config.model.dtype = "float32"  # the dtype of the computation; parameters are float32
    config.model.scan = False  # True to run the layers in one loop, compiled once
    # The activations that the backward pass finds in memory: False for all, True for each layer's
    # input, or names, such as "products,q,k,v,z,lse" (docs/performance.md)
    config.model.remat = FieldReference(False, field_type=object)

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 4e-3
    config.optimizer.warmup = 0.1
    config.optimizer.final = 0.05
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.98
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.optimizer.accumulate = 1  # batches whose gradients are averaged for an update
    return config
