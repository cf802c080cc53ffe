"""Trained models, of runs and of published folders: opened, asked for text, and looked into."""
