"""Kernels of wgmma for head dims above 256."""
