"""Serving: attention over keys and values in a pool of pages."""
