"""Lowering of derivatives that are computed in forward mode."""
