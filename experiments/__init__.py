"""Programs over flax_mha, each runnable as `python -m experiments.NAME`."""
