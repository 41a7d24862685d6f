"""The kernels of forward mode."""
