"""Trained models from runs and published folders: open them, generate text, look at their heads."""
