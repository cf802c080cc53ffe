"""The attention layer as functions of arrays: fields, parameters, projections, the call."""
