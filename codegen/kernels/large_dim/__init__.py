"""The wgmma kernels for head dims above 256."""
