"""An attention call, checked and in the form that all kernels read."""
