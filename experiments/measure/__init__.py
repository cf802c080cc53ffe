"""The measuring program, `python -m experiments.measure`."""
