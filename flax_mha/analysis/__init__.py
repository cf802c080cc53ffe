"""Analysis of trained models."""

from flax_mha.analysis.pruning import prune as prune
from flax_mha.analysis.watching import watch as watch
