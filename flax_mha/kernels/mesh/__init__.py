"""Attention over the ambient mesh: on shards of a call, and around a ring of devices."""
