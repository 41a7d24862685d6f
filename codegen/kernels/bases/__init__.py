"""What several kernels have in common."""
