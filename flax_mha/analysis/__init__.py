"""Analysis of trained models."""

from flax_mha.analysis.attribution import attribute_logits, logit_lens
from flax_mha.analysis.circuits import Factored, composition, ov, parameters, qk
from flax_mha.analysis.detectors import detect, token_pairs
from flax_mha.analysis.pruning import prune, watch
from flax_mha.analysis.reporting import report

__all__ = [
    "Factored", "attribute_logits", "composition", "detect", "logit_lens", "ov", "parameters",
    "prune", "qk", "report", "token_pairs", "watch",
]  # fmt: skip
__dir__ = __all__.copy
