"""Analysis of trained models."""

from flax_mha.analysis.report import report as report
from flax_mha.analysis.watching import watch as watch
