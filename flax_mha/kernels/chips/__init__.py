"""Facts of CPUs, GPUs and TPUs. GPUs and TPUs are known by the names of their kinds."""
