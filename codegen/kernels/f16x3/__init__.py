"""The wgmma kernels for float32, except for the forward."""
