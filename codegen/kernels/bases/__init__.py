"""The common parts of several kernels."""
