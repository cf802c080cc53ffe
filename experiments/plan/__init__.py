"""Plans of runs on absent devices. See `experiments.plan.__main__`."""
