"""The timing of programs, and the documents that keep the results."""
