"""The kernels that a process compiles, not counting those that it finds in the cache."""

from jax_memeff.codegen.toolchain import compile as compiler


def record() -> list[list[str]]:
    """A list that grows with each source compiled from now on: its kernels and architecture.

    Sources are counted when their kernels are stored, because other processes may compile them.
    """
    compiled: list[list[str]] = []
    store = compiler.store

    def recording(source, arch, names, result):
        compiled.append([f"{name} {arch}" for name in names])
        store(source, arch, names, result)

    compiler.store = recording
    return compiled
