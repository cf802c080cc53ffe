"""Analysis of trained models."""

from flax_mha.analysis.attribution import attribute_logits as attribute_logits
from flax_mha.analysis.attribution import logit_lens as logit_lens
from flax_mha.analysis.circuits import Factored as Factored
from flax_mha.analysis.circuits import composition as composition
from flax_mha.analysis.circuits import ov as ov
from flax_mha.analysis.circuits import parameters as parameters
from flax_mha.analysis.circuits import qk as qk
from flax_mha.analysis.detectors import detect as detect
from flax_mha.analysis.detectors import token_pairs as token_pairs
from flax_mha.analysis.pruning import prune as prune
from flax_mha.analysis.reporting import report as report
from flax_mha.analysis.watching import watch as watch

__all__ = [
    "Factored", "attribute_logits", "composition", "detect", "logit_lens", "ov", "parameters",
    "prune", "qk", "report", "token_pairs", "watch",
]  # fmt: skip
__dir__ = __all__.copy
