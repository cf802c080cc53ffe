"""The attention layer as functions of arrays: parameters, projections, norms, the call."""

from flax_mha.layer import plots as plots
