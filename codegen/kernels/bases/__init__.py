"""The parts that several kernels share."""
