"""The kernels for forward mode."""
