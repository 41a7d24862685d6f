"""What the kernels of several generations share."""
