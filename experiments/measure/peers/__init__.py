"""Attention timed next to other libraries: layers, attention alone, and decoding steps."""
