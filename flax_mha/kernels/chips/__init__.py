"""Facts of GPUs and TPUs by the names of their kinds, which may be elsewhere."""
