"""What a run would take on chips that are not there; see `experiments.plan.__main__`."""
