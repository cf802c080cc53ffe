"""Attention functions with the signatures of Flax's: ours for its layers, and others for ours."""
