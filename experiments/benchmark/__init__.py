"""The command python -m experiments.benchmark: attention, timed beside its peers."""
