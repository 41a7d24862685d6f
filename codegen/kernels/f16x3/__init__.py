"""The float32 kernels of wgmma besides the forward."""
