"""Calls of an inference server: the problems, the calls that are compared, and their table."""
