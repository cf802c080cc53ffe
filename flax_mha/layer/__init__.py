"""The attention layer as functions of arrays: parameters, projections, norms, the call."""
