"""From a problem to a compiled kernel: ``Problem`` → ``KernelSpec`` → source → fatbin.

Needs neither jax nor a GPU. Only ``compile.py`` imports ``cuda.core``, and only when a kernel is
compiled.
"""
