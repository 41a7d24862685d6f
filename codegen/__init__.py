"""From a problem to a compiled kernel: ``Problem`` → ``KernelSpec`` → source → fatbin.

This package needs neither jax nor a GPU. Only ``toolchain/nvrtc.py`` calls the compiler, and
``cuda.core`` is imported when the first kernel is compiled.
"""
