"""A kernel over the ambient mesh: on the shards of a call, and around a ring of devices."""
