"""Programs over flax_mha, each runnable as `python -m experiments.NAME`."""

from experiments import libtpu

libtpu.compiler_only()
