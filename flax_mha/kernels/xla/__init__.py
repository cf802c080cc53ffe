"""Kernels for every platform, of operations that XLA compiles, and the algebra of their tiles."""
