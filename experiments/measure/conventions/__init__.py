"""Conventions of attention in other packages: measures what docs/conventions.md says."""
