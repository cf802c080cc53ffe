"""Analysis of trained models."""

from flax_mha.analysis.detectors import detect as detect
from flax_mha.analysis.detectors import token_pairs as token_pairs
from flax_mha.analysis.pruning import prune as prune
from flax_mha.analysis.watching import watch as watch
