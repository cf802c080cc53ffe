"""The attention layer without linen or nnx: parameters, projections, norms, the call."""
