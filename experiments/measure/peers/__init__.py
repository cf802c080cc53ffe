"""Attention timed beside other libraries: layers, attention alone, and decoding steps."""
